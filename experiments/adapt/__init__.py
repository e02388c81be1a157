"""Default settings of adapt, and results on tasks not used to choose them."""
