"""Studies of iterative linearization (Goldwaser and Ge).

Source: Goldwaser and Ge, "Understanding sparse feature updates in deep networks using iterative
linearisation".
``period`` is figures 2 and 3, ``data_scaling`` figure 4, ``converged`` figure 5, ``quintic`` figure 6,
``resnet`` figures 7 and 8.
"""
