"""Appendix A.2: strong crops of the training images, for the optimum of a linear model.

Achille et al. find random resized crops too strong for some tasks, and significantly better on chest X-rays
alone. Here the linear model is fitted to copies of each image, each of which is cropped anew and weighs a
part of it, and center crops are tested; beside are whole images and center crops of them. The ridge is that
of least squared error on center crops of images left out with all their copies. The X-rays are another set
than the paper's, which cannot be had, and their classes come from several sources.

    python -m experiments.lqf.crops --threads 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import linnet
from experiments.lqf.informative import part_of
from experiments.lqf.tasks import Pair, accuracy, first_classes, linear_model, load, place_in_class
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

PARAMS = r"layer3\.2\.(conv2|bn2)|fc|linear"  # last convolution and its normalization, and head
PAIRS = (  # the side is that of the images before they are cropped
    Pair("resnet20", "chest_xray_96", 96, 20),
    Pair("resnet20", "eurosat_1000_500", 64, 10),
    Pair("resnet20", "flowers_64", 64, 10),
    Pair("resnet20", "rice_leaf_96", 96, 20),
)
KINDS = ("none", "center", "random-crop", "resized-crop")
NAMES = ("whole images", "center crops", "random crops", "random resized crops")
SIDE, COPIES, FOLDS, TESTED, ALPHA = 32, 3, 4, 1000, 15.0
DECADES = torch.linspace(-4, 4, 33, dtype=torch.float64)  # of ridges around the mean diagonal of the kernel


def compute(pair: Pair, kind: str, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy of the linear model that is fitted to cropped copies."""
    whole = pair if kind != "none" else replace(pair, side=SIDE)
    model, *both = load(whole, seed, data_dir, tested=TESTED)
    (x, y), (xt, yt) = map(first_classes, both)
    crop = linnet.Augmentation(kind, size=None if kind == "none" else SIDE)
    copies = COPIES if crop.is_random else 1
    views = [crop(x, 100 * seed + copy) if crop.is_random else crop(x) for copy in range(copies)]
    known, tested = crop.evaluation(x), crop.evaluation(xt)
    shown, labels = torch.cat(views), y.repeat(copies)
    lin = part_of(linear_model(model, (shown, labels), head="random", seed=seed), PARAMS)
    kernel, rows = kernels(lin, shown, known)
    target, goal = (ALPHA * one_hot(part[1]) - lin.base(part[0]) for part in ((shown, labels), (known, y)))
    ridges = kernel.diagonal()[: target.numel()].mean().item() / copies * 10**DECADES
    fold = place_in_class(y) % FOLDS
    errors = left_out(kernel, (target.double(), goal.double()), fold, ridges)
    best = ridges[errors.argmin()]
    square = kernel[: target.numel(), : target.numel()]
    inner = solved(square / copies, target.double().flatten() / copies**0.5, best[None])[0] / copies**0.5
    outputs = lin.base(tested) + lin.jvp(tested, inner.to(rows) @ rows)
    return {
        "accuracy": accuracy(outputs, yt),
        "told": float(errors.min()) / ALPHA**2,
        "ridge": float(best),
        "decade": float(DECADES[errors.argmin()]),
    }


def kernels(lin: linnet.Linearized, shown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of copies and center crops together, and the derivatives at the copies."""
    rows = [lin.jacobian(part).flatten(0, 1) for part in (shown, known)]
    both = torch.cat(rows)
    return (both @ both.T).double(), rows[0]


def solved(kernel: Tensor, target: Tensor, ridges: Tensor) -> Tensor:
    """(K + ρI)⁻¹t for each ρ, (R, N·C)."""
    values, vectors = torch.linalg.eigh(kernel)
    inner = (vectors.T @ target)[None] / (values.clamp_min(0)[None] + ridges[:, None])
    return inner @ vectors.T


def left_out(kernel: Tensor, targets: tuple[Tensor, Tensor], fold: Tensor, ridges: Tensor) -> Tensor:
    """Squared errors of center crops of images that are left out with all their copies, by ridge."""
    target, goal = targets
    copies, classes = len(target) // len(goal), goal.shape[1]
    total = torch.zeros(len(ridges), dtype=torch.float64)
    for out in (fold == one for one in fold.unique()):
        kept = (~out).repeat(copies).repeat_interleave(classes).nonzero()[:, 0]
        these = target.numel() + out.repeat_interleave(classes).nonzero()[:, 0]
        inner = solved(kernel[kept][:, kept] / copies, target.flatten()[kept] / copies**0.5, ridges)
        found = inner @ kernel[kept][:, these] / copies**0.5
        total += (found - goal[out].flatten()).square().sum(1)
    return total / len(goal)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a kind of crops; test errors, and by how much they are less than with center crops."""
    pairs = list(dict.fromkeys(cell["pair"] for cell in cells))
    short = [pair.split(" → ")[1].split(" ")[0] for pair in pairs]
    rows = []
    for kind, name in zip(KINDS, NAMES, strict=True):
        errors, less = [], []
        for pair in pairs:
            own = chosen(cells, "accuracy", pair=pair, kind=kind)
            center = chosen(cells, "accuracy", pair=pair, kind="center")
            errors.append(with_error((1 - one for one in own), scale=100))
            less.append(with_error((a - b for a, b in zip(own, center, strict=True)), scale=100))
        rows.append([name, *errors, *(["–"] * len(pairs) if kind == "center" else less)])
    weak, strong = ([chosen(cells, "accuracy", pair=pair, kind=kind) for pair in pairs] for kind in KINDS[2:])
    more = [
        with_error((a - b for a, b in zip(*both, strict=True)), scale=100)
        for both in zip(weak, strong, strict=True)
    ]
    rows.append([f"{NAMES[3]} less {NAMES[2]}", *more, *["–"] * len(pairs)])
    header = ["training images", *(f"{one}, error %" for one in short), *(f"{one}, less by" for one in short)]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] = PAIRS) -> None:
    """Run the study."""
    given = parser(__doc__ or "", seeds=5).parse_args(argv)
    study = Study("lqf/crops", given)
    cells = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "kind": kind, "copies": COPIES, "seed": seed},
            partial(compute, pair, kind, seed, given.data_dir),
        )
        for seed in study.seeds
        for pair in pairs
        for kind in KINDS
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
