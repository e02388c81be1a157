"""The linear model and its posterior: data, solved equations in two coordinates, Newton, constraints."""
