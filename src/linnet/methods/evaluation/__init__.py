"""How good predictions are: scores, calibration, foreign inputs, adversarial steps."""
