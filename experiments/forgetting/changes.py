"""A thousand changes in a row: samples come and go one at a time, against a fit made anew of what is left.

An encoder's features are fitted by ``linnet.adapt`` to half of 400 samples. At each step a sample that is in
is forgotten (``fit.forget``) or one that is out comes in (``fit.update``), at random. After every quarter of
the changes the fit is compared with one that is made anew of the samples that are left, at the same ridge and
scales: outputs on test samples, leave-one-out outputs, and the weights; each difference is the
largest one relative to the standard deviation of what is compared, that of weights in norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.forgetting.membership import encoded, linear_weights
from experiments.study import Cell, Study, parser
from experiments.tables import markdown

TASKS = ("EuroSAT", "spoken digits", "scenes", "question types", "news")
SAMPLES, QUERIES, CHANGES, QUARTERS = 400, 200, 1000, 4
WHAT = ("outputs", "left out", "weights")


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference over the standard deviation."""
    return float((one - other).abs().max() / other.std())


def changed(kept: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Distances from new fits along the changes."""
    generator = torch.Generator().manual_seed(seed)
    phi, y = F.normalize(kept["pool"].double()), kept["pool labels"]
    order = torch.randperm(len(y), generator=generator)
    some, query = order[:SAMPLES], F.normalize(kept["test"][:QUERIES].double())
    x, y = phi[some], y[some]
    net = nn.Sequential(nn.Identity(), nn.Linear(x.shape[1], int(y.max()) + 1)).double()
    inside, outside = list(range(SAMPLES // 2)), list(range(SAMPLES // 2, SAMPLES))
    fit = linnet.adapt(net, (x[inside], y[inside]), weight=0.0)
    found: dict[str, list[float]] = {name: [] for name in WHAT}
    for step in range(CHANGES):
        leaves = len(inside) > 2 and (not outside or bool(torch.rand(1, generator=generator) < 0.5))
        place = int(torch.randint(len(inside if leaves else outside), (1,), generator=generator))
        if leaves:
            outside.append(inside.pop(place))
            fit = fit.forget([place])
        else:
            inside.append(outside.pop(place))
            fit = fit.update((x[inside[-1:]], y[inside[-1:]]))
        if (step + 1) % (CHANGES // QUARTERS) == 0:
            anew = fit.recomputed()
            assert torch.equal(fit.x, x[inside])
            own, other = linear_weights(fit, x), linear_weights(anew, x)
            found["outputs"].append(apart(fit.predict(query), anew.predict(query)))
            found["left out"].append(apart(fit.loo(), anew.loo()))
            found["weights"].append(float((own - other).norm() / other.norm()))
    return {**found, "left": len(inside), "ridge": fit.ridge}


def table(cells: list[Cell]) -> str:
    """Markdown: a row a number of changes, the largest distances over tasks and draws."""
    rows = []
    for k in range(QUARTERS):
        count = (k + 1) * CHANGES // QUARTERS
        rows.append([f"{count:,}", *(f"{max(cell[name][k] for cell in cells):.1e}" for name in WHAT)])
    return markdown(["changes", *WHAT], rows)


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "", seeds=3)
    make.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    arguments = make.parse_args()
    study, cells = Study("forgetting/changes", arguments), []
    for name in TASKS:
        for seed in study.seeds:

            def compute(name: str = name, seed: int = seed) -> dict[str, Any]:
                return changed(encoded(name, arguments.features, arguments.data_dir), seed)

            cells.append(study.cell({"task": name, "seed": seed}, compute))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
