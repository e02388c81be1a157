"""Curvature matrices: Gauss-Newton, Fisher and Hessian, whole or approximated."""
