"""Studies that repeat published tables and figures with linnet.

One folder a source, one script a table or figure, each through the public API. Run one from the root of the
checkout, for example ``python -m experiments.lqf.pairs``; ``--help`` says what it takes.
"""
