"""Implementation of the commands: adapt a network, store it in a run folder, and query it.

A run folder holds all that the other commands need: the network's weights with its new head, the solved fit,
the training samples, and a record of where everything came from (see :mod:`linnet.app.runs.folder`).
"""
