"""The exceptions of linnet: each states the problem, what was expected and the remedy.

Each class also derives from the built-in exception that a caller would expect (``ValueError``,
``MemoryError``, ``ImportError``, ...), so code that knows nothing of linnet can catch them.
"""

from __future__ import annotations

__all__ = [
    "DataError",
    "DependencyError",
    "DiskSpaceError",
    "FileFormatError",
    "InputError",
    "LinnetError",
    "MemoryBudgetError",
    "ModelError",
    "NumericalError",
    "ProcessGroupError",
    "WeightsError",
]


class LinnetError(Exception):
    """An error that says what is wrong, what was expected and what to do.

    Args:
        what: What was wrong, naming the argument and its value.
        expected: What was expected instead.
        remedy: What to do about it.

    Example:
        >>> str(LinnetError("ridge is -1.0", expected="a positive number", remedy="pass ridge=1.0"))
        'ridge is -1.0. Expected: a positive number. To fix it: pass ridge=1.0.'
    """

    def __init__(self, what: str, expected: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.expected = expected
        self.remedy = remedy
        parts = [what, expected and f"Expected: {expected}", remedy and f"To fix it: {remedy}"]
        super().__init__(" ".join(_sentence(part) for part in parts if part))


def _sentence(text: str) -> str:
    """The text, ended with one full stop."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", ":")) else text + "."


class InputError(LinnetError, ValueError):
    """An argument has the wrong type, shape or value."""


class DataError(LinnetError, ValueError):
    """A data set cannot be used: empty, ragged, not finite, labels out of range."""


class ModelError(LinnetError, ValueError):
    """A network is not supported, or not in the way it is used."""


class WeightsError(ModelError):
    """Weights do not fit the network they were meant for."""


class FileFormatError(LinnetError, ValueError):
    """A file is truncated, altered, not linnet's or of another version."""


class MemoryBudgetError(LinnetError, MemoryError):
    """An operation would need more memory than its budget."""


class DiskSpaceError(LinnetError, OSError):
    """A file does not fit its disk, or is larger than the system lets a file be."""


class NumericalError(LinnetError, ArithmeticError):
    """A factorization or an iteration failed."""


class DependencyError(LinnetError, ImportError):
    """An optional package is missing or cannot be imported."""


class ProcessGroupError(LinnetError, RuntimeError):
    """A process of ``torch.distributed`` has ended, failed outside linnet, or made another call."""
