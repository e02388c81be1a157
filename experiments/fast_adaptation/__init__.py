"""Studies of fast adaptation with the tangent kernel (Maddox et al. 2021).

Maddox, Tang, Moreno, Wilson and Damianou, "Fast adaptation with linearized neural networks", 2021, and its
supplement.
"""
