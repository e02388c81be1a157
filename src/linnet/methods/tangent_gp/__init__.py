"""The tangent Gaussian process."""
