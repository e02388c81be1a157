"""Settings of an adaptation, in four small records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnet import params as check
from linnet.app.data import ImageTransform
from linnet.app.data.checks import check_seed
from linnet.errors import InputError

HEADS = ("auto", "probe", "random", "zero", "keep")
SOLVERS = ("auto", "dual", "shared", "primal", "sketch", "cg")
SQUARED = ("shared", "primal", "sketch")  # solvers of the squared loss
METRICS = ("auto", "none", "kfac")
LOSSES = ("auto", "squared", "cross-entropy")
COMPARED = ("probe", "finetune")
METHODS = ("auto", "nested", "linear")
LEAVE = "leave it out to have it chosen"
CRITERIA = {"auto": "loo", "loo": "loo", "gcv": "gcv", "evidence": "evidence"}


@dataclass(frozen=True)
class Network:
    """The network to start from."""

    spec: str  # ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``
    weights: Path | None = None  # weights for the network with its old head
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory
    # `"probe"`, `"random"`, `"zero"`, `"keep"`, or `"auto"`: for a regression the old head where it fits,
    # else a probe, or a random one where there are fewer samples than features
    head: str = "auto"
    cross_fit: int = 0  # folds of a probe, so that leave-one-out leaves out its part too; 0 for none
    # the part of what the network returns that is taken; by default as `linnet.adapt` does
    output: str | None = None

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"head is {self.head!r}", expected=f"one of {', '.join(HEADS)}", remedy=LEAVE)
        if self.cross_fit and self.head not in ("auto", "probe"):
            raise InputError(
                f"cross_fit is {self.cross_fit} with head {self.head!r}",
                expected="a probe: other heads have seen no label",
                remedy="leave --cross-fit out, or pass --head probe",
            )


@dataclass(frozen=True)
class Source:
    """The data to learn from and to test on."""

    path: Path  # an image folder, an ``.npz`` archive or a ``.csv`` table
    transform: ImageTransform | None = None  # from stored images to inputs; None for the default
    shots: int | None = None  # training samples of each class; None for all
    tests: int | None = None  # test samples to evaluate; None for all
    seed: int = 0  # seed of the split and of the draws
    target: str | None = None  # column of a table to predict
    # `"error"` refuses image files that cannot be decoded, `"skip"` leaves them out
    damaged: str = "error"
    # whether images are normalized as the network's own configuration says, if it does
    normalizes: bool = False
    at_most: bool = False  # whether a class with fewer samples than ``shots`` gives all that it has

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check.choice("damaged", self.damaged, ("error", "skip"), LEAVE)


@dataclass(frozen=True)
class Solving:
    """Settings of the fit."""

    ridge: float | str = "auto"  # ρ, or ``"auto"`` (leave-one-out), ``"loo"``, ``"gcv"`` or ``"evidence"``
    solver: str = "auto"  # ``"auto"``, ``"dual"``, ``"shared"``, ``"primal"``, ``"sketch"`` or ``"cg"``
    # parameters to fit, by name or regular expression, or their names
    params: str | tuple[str, ...] | None = None
    memory: str | None = None  # budget such as ``"2GB"``
    device: str = "cpu"  # where to compute
    # `"squared"`, `"cross-entropy"`, or `"auto"`: the one of lower leave-one-out log loss
    loss: str = "squared"
    # of the ridge: `"none"` is one for all weights, `"kfac"` is the curvature of the network, `"auto"` takes
    # it for classes
    metric: str = "auto"
    # `"nested"`, the linear probe and the lower layers in one solve (`linnet.adapt`); `"linear"`, one
    # linearization at a head; `"auto"`: nested where nothing is requested that only the other has
    method: str = "auto"
    weight: float | str = "auto"  # share of the lower layers in the nested kernel, 0 to 1, or ``"auto"``
    # whether to train the lower layers of a nested fit where held-out folds say that it helps
    tune: bool = False
    # A `.npy` file of the kernel, which parts may have made and which stays; by default one in the run's
    # folder, until the fit is there
    kernel: Path | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("weight", "ridge") if getattr(self, name) != "auto"]
        if check.flag("tune", self.tune) and given:
            raise InputError(
                f"{given[0]} is given with tune",
                expected="held-out folds to choose it",
                remedy=f"leave --{given[0]} or --tune out",
            )
        check.choice("method", self.method, METHODS, LEAVE)
        if self.weight != "auto":
            check.number("weight", self.weight, least=0, most=1, remedy=LEAVE)
        if self.metric not in METRICS:
            raise InputError(
                f"metric is {self.metric!r}", expected=f"one of {', '.join(METRICS)}", remedy=LEAVE
            )
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}", expected=f"one of {', '.join(LOSSES)}", remedy=LEAVE)
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
        if self.solver == "sketch" and self.metric == "kfac":
            raise InputError(
                f"metric is {self.metric!r} with solver {self.solver}",
                expected="one of the two: the directions of a sketch are coordinates of their own",
                remedy="pass --metric none, or leave --solver out",
            )
        check_device(self.device)

    @property
    def criterion(self) -> float | str:
        """The ridge as ``linnet.fit`` takes it."""
        return CRITERIA[self.ridge] if isinstance(self.ridge, str) else float(self.ridge)


@dataclass(frozen=True)
class Settings:
    """An adaptation."""

    network: Network  # what to start from
    source: Source  # what to learn from
    solving: Solving = field(default_factory=Solving)  # settings of the fit
    compare: str = "probe"  # ``"probe"``, or ``"finetune"`` to compare with plain fine-tuning as well
    finetune_steps: int = 150  # steps of each run of it
    title: str = ""  # title of the report; made from the data's name when empty

    def __post_init__(self) -> None:
        if self.network.cross_fit and self.solving.metric == "kfac":
            raise InputError(
                f"metric is {self.solving.metric!r} with cross_fit {self.network.cross_fit}",
                expected="one of the two, since each fold would need its own metric",
                remedy="leave --metric or --cross-fit out",
            )
        check.choice("compare", self.compare, COMPARED, LEAVE)
        check.integer("finetune_steps", self.finetune_steps)


def check_device(name: str) -> None:
    """Require a device that torch can use here."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        # torch answers an unknown name with all those that it has ever known
        unknown = "Expected one of" in str(error)
        reason = "torch knows no such device" if unknown else str(error).splitlines()[0][:120]
        raise InputError(
            f"device is {name!r}, which does not work here ({reason})",
            expected="cpu, auto, or a device that linnet doctor lists",
            remedy="try --device cpu",
        ) from error
