"""One trained network, many tasks.

Maddox, Tang, Moreno, Wilson and Damianou, "Fast adaptation with linearized neural networks", 2021, and its
supplement.
"""
