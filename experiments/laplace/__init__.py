"""Uncertainty by Laplace's method.

Botev, "The Gauss-Newton matrix for deep learning models and its applications", 2020, sections 5.1 and 5.2
(Ritter, Botev and Barber 2018).
"""
