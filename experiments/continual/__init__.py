"""Botev 2020, sections 5.3 and 5.4: learning one task after the other.

Beside the thesis' figures: the official protocol of synaptic intelligence, split MNIST, and the stream on a
linearized network, where the online posterior is exact.
"""
