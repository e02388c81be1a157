"""Plots: what ``result.plot`` draws, and the numbers and drawings behind it.

matplotlib is imported when something is drawn.
"""
