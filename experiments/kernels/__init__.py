"""Spectra, alignment and anisotropy of the tangent kernel, and the verdict built on them.

Ortiz-Jimenez, Moosavi-Dezfooli and Frossard, "What can linearized neural networks actually say about
generalization?" (NeurIPS 2021): the table and the figures of its supplement.
"""
