"""A linear probe and the linearized layers below it as one linear model whose features saw no label."""
