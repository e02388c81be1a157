"""A linear probe and the linearized layers below it as one linear model with label-free features."""
