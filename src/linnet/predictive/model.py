"""The interface of all fitted models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.errors import InputError
from linnet.predictive.distribution import Predictive
from linnet.tangent.batch import Inputs


class PredictiveModel(ABC):
    """A fitted model: ``predict`` gives outputs, ``predictive`` their distribution."""

    @abstractmethod
    def predictive(self, x: Inputs) -> Predictive:
        """The distribution of the outputs, given the data.

        Args:
            x: N examples.

        Returns:
            The distribution.
        """

    def predict(self, x: Inputs) -> Tensor:
        """The mean of the outputs.

        Args:
            x: N examples.

        Returns:
            E[f(x)], (N, C).

        Raises:
            DataError: If x is empty or not finite.
        """
        return self.predictive(x).mean

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Summary of the fit, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """

    def save(self, directory: str | Path) -> Path:
        """Write the model to a folder.

        Args:
            directory: The folder.

        Raises:
            InputError: Models of this kind have no file format.
        """
        name = type(self).__name__
        raise InputError(
            f"save({str(directory)!r}) of a {name}",
            expected="a LinearFit, SoftmaxFit, NestedFit, Laplace, TangentGP or Finetuned",
            remedy=f"keep the data and the network's state_dict, and make the {name} again from them",
        )

    def __repr__(self) -> str:
        """The numbers that matter."""
        known = {k: v for k, v in self.summary().items() if isinstance(v, int | float | str)}
        shown = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in known.items()]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """A table of the summary, for notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(str(key))}</th><td>{_cell(value)}</td></tr>"
            for key, value in self.summary().items()
            if value not in (None, "", [], {})
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _cell(value: Any) -> str:
    """A value of a summary as HTML: numbers with four digits, lists and dicts line by line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key))}: {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return "<br>".join(_cell(inner) for inner in value)
    return escape(str(value))
