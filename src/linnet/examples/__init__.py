"""Small data sets that come with linnet, for its demo, its examples and first steps."""

from __future__ import annotations

from linnet.examples.digits import load_digits as load_digits

__all__ = ["load_digits"]
