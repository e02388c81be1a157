"""Small data sets for the demo, the examples and tutorials."""

from __future__ import annotations

from linnet.examples.digits import load_digits as load_digits

__all__ = ["load_digits"]
