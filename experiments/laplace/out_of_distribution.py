"""Letters seen by a network of digits: predictive entropy on notMNIST (Botev 2020, figure 5.2 and table 5.1).

A 784-1024-1024-10 network trained with dropout on binarized MNIST predicts notMNIST by: a deterministic
pass; MC dropout; sampled weights of the Kronecker-factored and of the diagonal Laplace approximation, N and
λ chosen on validation digits; and a factorized Gaussian (FFG) trained by a variational bound. Test
accuracies of the thesis: FFG 98.88, deterministic 98.86, MC dropout 98.85, diagonal Laplace 98.85,
Kronecker Laplace 98.80 %. Its figure shows the share of letters whose entropy is above c: Kronecker Laplace
is highest, then MC dropout and the diagonal, then the deterministic pass; FFG is as certain as the latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import linnet
from experiments.figures import figure, save
from experiments.laplace.networks import binarized, digits, options, predictors, resized, sizes
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

PUBLISHED = {
    "FFG": 98.88, "deterministic": 98.86, "MC dropout": 98.85, "diagonal Laplace": 98.85,
    "Kronecker Laplace": 98.80,
}  # fmt: skip
POINTS = 47


def judged(predict: Any, test: Any, letters: Any) -> dict[str, Any]:
    """Accuracy and entropies; a call takes 2000 images, so that weights are moved through memory rarely."""
    report = linnet.evaluate(predict, test, batch_size=2000)
    separation = linnet.ood(predict, test[0][:2000], letters, batch_size=2000)
    threshold = torch.linspace(0, math.log(separation.classes), POINTS, dtype=torch.float64)
    share = (separation.outside.entropy > threshold[:, None]).double().mean(1)
    return {
        "accuracy": report.accuracy, "nll": report.nll, "ece": report.ece, "entropy_test": report.entropy,
        "entropy": separation.entropy_outside, "auroc": separation.auroc, "fpr95": separation.fpr95,
        "certain": float((separation.outside.entropy < 0.1).double().mean()),
        "threshold": threshold.tolist(), "share": share.tolist(),
    }  # fmt: skip


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Figure 5.2, averaged over seeds."""
    drawn, ax = figure(width=4.6, height=3.2)
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        shares = torch.tensor([cell["share"] for cell in own]).mean(0)
        ax.plot(own[0]["threshold"], shares, label=method)
    ax.set(xlabel="entropy c (nats)", ylabel="share of letters above c", ylim=(0, 1.02))
    ax.legend(fontsize=8)
    save(drawn, study.out / "out_of_distribution.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    given = resized(options(parser(__doc__ or "", seeds=1)).parse_args(arguments))
    study = Study("laplace/out_of_distribution", given)
    folder: Path = given.networks or study.out.parent / "networks"
    data = digits(given)
    test = binarized(data.test[0], 8000), data.test[1]
    letters = binarized(data.letters, 9000)
    cells = []
    for seed in study.seeds:
        makers, facts = predictors(data, given, seed, folder)
        for method, make in makers.items():
            what = {"method": method, "seed": seed, **sizes(given), "samples": given.samples,
                    "test": len(test[0]), "letters": len(letters)}  # fmt: skip
            hyper = facts.get(method, dict)
            cells.append(study.cell(what, lambda m=make, h=hyper: judged(m(), test, letters) | h()))
    study.publish(table(cells), cells, published_accuracy=PUBLISHED)
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each method."""
    rows = [
        [method, f"{PUBLISHED[method]:.2f}" if method in PUBLISHED else "–",
         with_error(chosen(cells, "accuracy", method=method), 2, 100),
         *(with_error(chosen(cells, name, method=method), 3)
           for name in ("nll", "entropy_test", "entropy", "certain", "auroc")),
         "; ".join(f"{c['n']:.3g}, {c['prior']:.3g}" for c in cells if c["method"] == method and "n" in c)
         or "–"]
        for method in dict.fromkeys(cell["method"] for cell in cells)
    ]  # fmt: skip
    header = [
        "method", "thesis: accuracy %", "accuracy %", "NLL", "entropy, digits", "entropy, letters",
        "letters with entropy < 0.1", "AUROC", "N, λ",
    ]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
