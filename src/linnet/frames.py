"""Tables for pandas, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from linnet.errors import DependencyError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(columns: Mapping[str, Tensor | None], index: str = "example") -> DataFrame:
    """A table of columns of one length."""
    # columns (N,)
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise DependencyError(
            "to_frame() needs pandas, which cannot be imported",
            expected="pandas 2 or later",
            remedy="pip install pandas; the same numbers are tensors in this object's fields and methods",
        ) from error
    arrays = {name: _exact(value).cpu().numpy() for name, value in columns.items() if value is not None}
    table = DataFrame(arrays)
    return table.set_index(index) if index in arrays else table.rename_axis(index)


def outputs(name: str, values: Tensor) -> dict[str, Tensor]:
    """Columns of outputs."""
    # values (N, C)
    if values.shape[1] == 1:
        return {name: values[:, 0]}
    return {f"{name} {k}": values[:, k] for k in range(values.shape[1])}


def _exact(value: Tensor) -> Tensor:
    """A tensor in a type that numpy has."""
    value = value.detach()
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
