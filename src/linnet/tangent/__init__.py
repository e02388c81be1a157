"""One network, to first order."""
