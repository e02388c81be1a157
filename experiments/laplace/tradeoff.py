"""Entropy on letters against loss on digits, for posteriors of every width (beside Botev 2020, figure 5.2).

What N and λ are chosen by decides how uncertain Laplace's method is far from the data. Here they are not
chosen: for a grid of both, the networks of ``out_of_distribution`` are sampled and judged on validation
digits and on letters. A structure is better than another where it has more entropy on letters at the same
loss on digits. The thesis has no such figure; it is the check behind the table of ``out_of_distribution``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import linnet
from experiments.baselines.dropout import mc_dropout
from experiments.figures import COLORS, figure, save
from experiments.laplace.networks import (
    Sampled,
    binarized,
    digits,
    fitted,
    options,
    resized,
    sizes,
    trained,
)
from experiments.study import Study, parser
from experiments.tables import markdown
from linnet.likelihoods import Categorical

GRIDS = {
    "Kronecker Laplace": ("kfac", [(1, 1e3), (1, 1e2), (10, 1e2), (100, 1e2), (10, 1e1), (100, 1e1)]),
    "diagonal Laplace": ("diagonal", [(1, 1e4), (1, 1e3), (10, 1e3), (100, 1e3), (10, 1e2), (100, 1e2)]),
}


def judged(predict: Any, validation: Any, letters: torch.Tensor) -> dict[str, float]:
    """Loss and accuracy on digits, entropy on letters."""
    report = linnet.evaluate(predict, validation, batch_size=1000)
    foreign = linnet.ood(predict, validation[0][:100], letters, batch_size=1000)
    return {
        "nll": report.nll, "nll_error": report.stderr["nll"], "accuracy": report.accuracy,
        "entropy": foreign.entropy_outside,
    }  # fmt: skip


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Entropy against loss."""
    drawn, ax = figure(width=4.6, height=3.2)
    for color, method in zip(COLORS, dict.fromkeys(c["method"] for c in cells), strict=False):
        own = sorted((c["nll"], c["entropy"]) for c in cells if c["method"] == method)
        ax.plot(*zip(*own, strict=True), "o-" if len(own) > 1 else "s", color=color, label=method, ms=4)
    ax.set(xlabel="negative log-likelihood of digits (nats)", ylabel="entropy of letters (nats)")
    ax.legend(fontsize=8)
    save(drawn, study.out / "tradeoff.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    given = resized(options(parser(__doc__ or "", seeds=1)).parse_args(arguments))
    given.samples = min(given.samples, 10) if not given.full else given.samples
    study = Study("laplace/tradeoff", given)
    folder: Path = given.networks or study.out.parent / "networks"
    folder.mkdir(parents=True, exist_ok=True)
    data = digits(given)
    validation = binarized(data.validation[0], 6000), data.validation[1]
    letters = binarized(data.letters, 9000)[:1000]
    cells = []
    for seed in study.seeds:
        with_dropout = trained(data, given, seed, folder)
        model = trained(data, given, seed, folder, given.posterior_of)
        shared = {"seed": seed, **sizes(given), "samples": given.samples}
        dropout = mc_dropout(with_dropout, Categorical(), given.samples, seed)
        points: dict[str, Any] = {"deterministic": lambda x, m=model: m(x).softmax(1), "MC dropout": dropout}
        for name, predict in points.items():
            run = lambda p=predict: judged(p, validation, letters)  # noqa: E731
            cells.append(study.cell({"method": name, **shared}, run))
        for name, (structure, grid) in GRIDS.items():
            for times, prior in grid:

                def sampled(structure: str = structure, times: float = times, prior: float = prior) -> Any:
                    la = fitted(structure, model, data, given, folder, seed)  # noqa: B023
                    one = [part[:1] for part in validation]
                    scale = times / given.draws
                    grid = linnet.Grid(prior_precision=prior, data_scale=scale, predict="mc", samples=1)
                    la.tune("grid", one, search=grid)
                    return judged(Sampled(model, la.sample(given.samples, seed)), validation, letters)  # noqa: B023

                cells.append(study.cell({"method": name, "times": times, "prior": prior, **shared}, sampled))
    rows = [
        [c["method"], f"{c['times']:g}, {c['prior']:g}" if "times" in c else "–",
         f"{c['nll']:.4f} ± {c['nll_error']:.4f}", f"{100 * c['accuracy']:.1f}", f"{c['entropy']:.3f}"]
        for c in sorted(cells, key=lambda c: (c["method"], c["nll"]))
    ]  # fmt: skip
    study.publish(
        markdown(["", "N / images, λ", "NLL of digits", "accuracy %", "entropy of letters"], rows), cells
    )
    draw(study, cells)


if __name__ == "__main__":
    main()
