"""Supplement C.2: anisotropy directions at the origin beside those of the derivative's mean over images.

Ortiz-Jimenez et al. take the derivative at the origin in place of its mean over the data. Here both are
taken of one network at its initialization: ‖U₀ᵀ U‖² / k is the share of one space of k leading directions
that lies in the other (1 where they are the same, k / 1024 for random ones of 1 × 32 × 32 images), beside
the cosine of the first two directions. The images are CIFAR-10's, normalized, and gray by the mean of
their colors.

    python -m experiments.kernels.directions_of_data --threads 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.kernels.directions import NETWORKS, directions, make
from experiments.kernels.networks import cifar10
from experiments.sources import CIFAR, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import spectrum

COUNT = 10
WIDTH = 8


def compared(name: str, seed: int, x: Tensor) -> dict[str, Any]:
    """Overlap of the leading directions, the cosine of the first, and the first singular values."""
    origin = directions(name, seed, WIDTH, COUNT, str(x.device))
    mean = spectrum.anisotropy_directions(make(name, seed, WIDTH).to(x.device), x, k=COUNT, tolerance=1e-4)
    products = origin.directions.flatten(1) @ mean.directions.flatten(1).T
    return {
        "overlap": float(products.square().sum()) / COUNT, "first": float(products[0, 0].abs()),
        "at the origin": float(origin.singular_values[0]), "over the data": float(mean.singular_values[0]),
    }  # fmt: skip


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each network."""
    rows = []
    for name in dict.fromkeys(cell["network"] for cell in cells):
        own = {
            key: chosen(cells, key, network=name)
            for key in ("overlap", "first", "at the origin", "over the data")
        }
        rows.append([name, *(with_error(values, 2 if key in ("overlap", "first") else 4)
                             for key, values in own.items())])  # fmt: skip
    header = [
        "network",
        "overlap of ten",
        "cosine of the first",
        "singular value at the origin",
        "of the mean",
    ]
    return markdown(header, rows)


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--images", type=int, default=50, help="images of the mean")
    options.add_argument("--networks", nargs="*", choices=NETWORKS, default=["LeNet"])
    given = options.parse_args(words)
    colors = pixels(cifar10(given.data_dir, given.full).train_x[: given.images], CIFAR)
    x = torch.as_tensor(colors).mean(1, keepdim=True).to(given.device)
    study = Study("kernels/directions_of_data", given)
    cells = [
        study.cell(
            {"network": name, "seed": seed, "images": len(x), "width": WIDTH},
            lambda n=name, s=seed: compared(n, s, x),
        )
        for name in given.networks
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
