"""Plots: what ``fit.plot`` and ``model.plot`` draw, and the numbers and drawings behind them.

matplotlib is imported when something is drawn.
"""
