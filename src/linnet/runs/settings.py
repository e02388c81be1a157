"""What a user asks of an adaptation, in four small records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnet.data import ImageTransform
from linnet.data.checks import check_seed
from linnet.errors import InputError

HEADS = ("auto", "probe", "random", "zero", "keep")
SOLVERS = ("auto", "dual", "cg")
LEAVE = "leave it out to have it chosen"
CRITERIA = {"auto": "loo", "loo": "loo", "gcv": "gcv", "evidence": "evidence"}


@dataclass(frozen=True)
class Network:
    """The network to start from.

    Args:
        spec: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``.
        weights: Weights for the network with its old head.
        arguments: Keyword arguments of the factory.
        head: ``"probe"``, ``"random"``, ``"zero"``, ``"keep"``, or ``"auto"``: for a regression the old head
            where it fits, else a probe, or a random one where there are fewer samples than features.

    Raises:
        InputError: The head is none of these.
    """

    spec: str
    weights: Path | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    head: str = "auto"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"head is {self.head!r}", expected=f"one of {', '.join(HEADS)}", remedy=LEAVE)


@dataclass(frozen=True)
class Source:
    """The data to learn from and to test on.

    Args:
        path: An image folder, an ``.npz`` archive or a ``.csv`` table.
        transform: From stored images to inputs; None for the default.
        shots: Training samples of each class; None for all.
        tests: Test samples to evaluate; None for all.
        seed: Seed of the split and of the draws.
        target: Column of a table to predict.

    Raises:
        InputError: The seed is out of range.
    """

    path: Path
    transform: ImageTransform | None = None
    shots: int | None = None
    tests: int | None = None
    seed: int = 0
    target: str | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class Solving:
    """How to fit.

    Args:
        ridge: ρ, or ``"auto"`` (leave-one-out), ``"loo"``, ``"gcv"`` or ``"evidence"``.
        solver: ``"auto"``, ``"dual"`` or ``"cg"``.
        params: Parameters to fit, by name or regular expression.
        memory: Budget such as ``"2GB"``.
        device: Where to compute.

    Raises:
        InputError: The ridge, the solver or the device makes no sense.
    """

    ridge: float | str = "auto"
    solver: str = "auto"
    params: str | None = None
    memory: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.ridge, str) and self.ridge not in CRITERIA:
            raise InputError(
                f"ridge is {self.ridge!r}",
                expected="a positive number, auto, loo, gcv or evidence",
                remedy=LEAVE,
            )
        if not isinstance(self.ridge, str) and not (math.isfinite(self.ridge) and self.ridge > 0):
            raise InputError(
                f"ridge is {self.ridge}", expected="a positive number", remedy="try --ridge auto"
            )
        if self.solver not in SOLVERS:
            raise InputError(
                f"solver is {self.solver!r}", expected=f"one of {', '.join(SOLVERS)}", remedy=LEAVE
            )
        check_device(self.device)

    @property
    def criterion(self) -> float | str:
        """The ridge as ``linnet.fit`` takes it."""
        return CRITERIA[self.ridge] if isinstance(self.ridge, str) else float(self.ridge)


@dataclass(frozen=True)
class Settings:
    """An adaptation.

    Args:
        network: What to start from.
        source: What to learn from.
        solving: How to fit.
        baseline: Steps of plain fine-tuning to compare with; 0 for none.
        title: Title of the report; made from the data's name when empty.

    Raises:
        InputError: ``baseline`` is negative.
    """

    network: Network
    source: Source
    solving: Solving = field(default_factory=Solving)
    baseline: int = 150
    title: str = ""

    def __post_init__(self) -> None:
        if self.baseline < 0:
            raise InputError(
                f"baseline steps are {self.baseline}",
                expected="a positive number",
                remedy="pass --no-baseline to leave the comparison out",
            )


def check_device(name: str) -> None:
    """Require a device that torch can use here.

    Args:
        name: Such as ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: It is unknown or absent.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is {name!r}, which does not work here ({str(error).splitlines()[0][:120]})",
            expected="cpu, or a device that linnet doctor lists",
            remedy="try --device cpu",
        ) from error
