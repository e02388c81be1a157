"""Linearization of networks: tangent products, Jacobians and kernels."""
