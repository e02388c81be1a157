"""Predictions under adversarial perturbations (Botev 2020, figures 5.3 and 5.4).

The networks of ``out_of_distribution``, attacked by fast gradient signs: untargeted (eq. 5.15), one step of
size η times the range of each pixel away from the class predicted; targeted (eq. 5.16), 50 steps of 0.01
toward the digit 0, of the images not predicted as 0. Each method is attacked by the gradient of its own
averaged predictions. In the thesis, Kronecker Laplace becomes the most uncertain as η grows, both Laplace
approximations keep a higher accuracy than MC dropout, the deterministic pass keeps the highest and stays
certain, and FFG is the worst; aimed at 0, half of the images go over after about 20 steps under Kronecker
Laplace and after about 10 under the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.figures import COLORS, figure, save
from experiments.laplace import attack
from experiments.laplace.networks import (
    METHODS,
    Predict,
    binarized,
    digits,
    options,
    predictors,
    resized,
    sizes,
)
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

STEPS = tuple(0.05 * k for k in range(11))  # η of the untargeted attack
SHOWN = (STEPS[1], STEPS[2], STEPS[4], STEPS[10])
SIZE, MOST, TARGET = 1e-2, 50, 0


def in_float64(predict: Predict) -> Predict:
    """Averaged probabilities in double precision, so that certain predictions keep a gradient."""

    def averaged(x: Tensor) -> Tensor:
        p = predict(x).double()
        return p.mean(0) if p.ndim == 3 else p

    return averaged


def untargeted(predict: Predict, data: tuple[Tensor, Tensor], span: Tensor) -> dict[str, Any]:
    """Accuracy, share kept, and entropy against η, which is in units of each pixel's range."""
    x, y = data
    points, unmoved = attack.untargeted(predict, x, STEPS, span)
    before = attack.probabilities(predict, x).argmax(1)
    return {
        "steps": list(STEPS),
        "unmoved": unmoved,
        **attack.curves(predict, points, accuracy=y, kept=before),
    }


def targeted(predict: Predict, data: tuple[Tensor, Tensor], span: Tensor, iterations: int) -> dict[str, Any]:
    """The same against the number of steps, and the share that is predicted as 0."""
    before = attack.probabilities(predict, data[0]).argmax(1)
    others = before != TARGET
    (x, y), before = (part[others] for part in data), before[others]
    points, unmoved = attack.targeted(predict, x, SIZE, span, TARGET, iterations)
    aims = torch.full_like(before, TARGET)
    curves = attack.curves(predict, points, accuracy=y, kept=before, reached=aims)
    half = next((k for k, share in enumerate(curves["reached"], 1) if share >= 0.5), iterations + 1)
    return {"steps": list(range(1, iterations + 1)), "half": half, "unmoved": unmoved, **curves}


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Figures 5.3 (above) and 5.4 (below)."""
    drawn, axes = figure(columns=3, rows=2, width=3.2, height=2.5)
    panels = [
        ("untargeted", "entropy"), ("untargeted", "accuracy"), None,
        ("targeted", "entropy"), ("targeted", "accuracy"), ("targeted", "reached"),
    ]  # fmt: skip
    labels = {"entropy": "entropy (nats)", "accuracy": "accuracy", "reached": "predicted as 0"}
    for ax, panel in zip(axes.flat, panels, strict=True):
        if panel is None:
            ax.axis("off")
            ax.legend(handles=axes.flat[0].lines, loc="center", fontsize=8)
            continue
        attack, quantity = panel
        for color, method in zip(COLORS, METHODS, strict=False):
            own = [c for c in cells if c["method"] == method and c["attack"] == attack]
            ax.plot(
                own[0]["steps"], torch.tensor([c[quantity] for c in own]).mean(0), color=color, label=method
            )
        ax.set(xlabel="η" if attack == "untargeted" else "steps of 0.01", ylabel=labels[quantity])
    save(drawn, study.out / "adversarial.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options_ = options(parser(__doc__ or "", seeds=1))
    options_.add_argument("--attacked", type=int, default=500, help="test images attacked")
    options_.add_argument("--aimed", type=int, default=200, help="of these, by the targeted attack")
    options_.add_argument("--drawn", type=int, default=20, help="networks that predictions average")
    options_.add_argument("--iterations", type=int, default=MOST)
    given = resized(options_.parse_args(arguments))
    if given.full:
        given.attacked, given.aimed, given.drawn = 10_000, 10_000, given.samples
    given.samples = given.drawn
    study = Study("laplace/adversarial", given)
    folder: Path = given.networks or study.out.parent / "networks"
    data = digits(given)
    x, y = binarized(data.test[0], 8000), data.test[1]
    span = data.train[0].amax(0).ceil()  # of a binarized pixel: 1 where it is ever on
    cells = []
    for seed in study.seeds:
        makers, _ = predictors(data, given, seed, folder)
        for method, make in makers.items():
            what = {"method": method, "seed": seed, **sizes(given), "samples": given.drawn}
            made: list[Predict] = []

            def predict(
                batch: Tensor, make: Callable[[], Predict] = make, made: list[Predict] = made
            ) -> Tensor:
                if not made:
                    made.append(in_float64(make()))
                return made[0](batch)

            one = (x[: given.attacked], y[: given.attacked])
            few = (x[: given.aimed], y[: given.aimed])
            cells += [
                study.cell({"attack": "untargeted", **what, "images": len(one[0])},
                           lambda p=predict, d=one: untargeted(p, d, span)),
                study.cell({"attack": "targeted", **what, "images": len(few[0]), "steps_": given.iterations},
                           lambda p=predict, d=few: targeted(p, d, span, given.iterations)),
            ]  # fmt: skip
    study.publish(table(cells), cells)
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each method."""
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        near = [c for c in cells if c["method"] == method and c["attack"] == "untargeted"]
        aimed = [c for c in cells if c["method"] == method and c["attack"] == "targeted"]
        at = [near[0]["steps"].index(s) for s in SHOWN]
        rows.append([
            method, *(with_error([c["accuracy"][k] for c in near], 1, 100) for k in at),
            *(with_error([c["entropy"][k] for c in near], 2) for k in at),
            with_error(chosen(aimed, "half"), 1), with_error([c["reached"][-1] for c in aimed], 1, 100),
            with_error([max(c["entropy"]) for c in aimed], 2),
        ])  # fmt: skip
    header = [
        "method", *(f"accuracy %, η = {s:g}" for s in SHOWN), *(f"entropy, η = {s:g}" for s in SHOWN),
        "steps until half are 0", "predicted as 0 at the end, %", "highest entropy on the way",
    ]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
