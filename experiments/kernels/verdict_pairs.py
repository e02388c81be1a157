"""The measures of ``linnet spectrum`` as predictors of the winner on the pairs of the LQF experiments.

``experiments.lqf.pairs`` has fine-tuned a ResNet-20 and a MobileNetV2 on new tasks: linearly by LQF's
recipe (lqf), to the optimum of a linear model (optimum) and plainly (nlft). For each pair and each draw of
its training images, ``linnet.spectrum.task_linearity`` measures the task on those images alone: the network
with Leaky ReLU as LQF has it, and a random head, which has seen no label. The cut of each measure is the one
that was right most often among the fits of ``experiments.kernels.verdict``: other networks, other draws.

    python -m experiments.lqf.pairs --threads 1        # the winners
    python -m experiments.kernels.verdict --threads 1  # the cuts
    python -m experiments.kernels.verdict_pairs --threads 1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import linnet
from experiments.kernels.verdict import MEASURES, area, threshold
from experiments.kernels.verdict_folds import KNOWN, counted, known
from experiments.lqf.tasks import PAIRS, Pair, linear_model, load
from experiments.study import ROOT, Study, parser
from experiments.tables import markdown
from linnet import spectrum

PLACES = (ROOT / "docs" / "results" / "lqf" / "pairs.json",
          ROOT / "runs" / "experiments" / "lqf" / "pairs" / "cells.jsonl")  # fmt: skip
LINEAR = ("lqf", "optimum")


def measured(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """What is known of a pair before any test image is seen."""
    model, train, _ = load(pair, seed, data_dir)
    fit = linnet.fit(linear_model(model, train, head="random", seed=seed), train, ridge="loo")
    found = spectrum.task_linearity(fit, progress=False)
    held = found.held_out
    assert held is not None
    return {
        "explained": held.explained, "accuracy": held.accuracy, "concentration": found.concentration,
        "lift": found.lift, "dimension": found.effective_dimension / fit.n, "gap": found.gap.training,
        "verdict": found.verdict.level, "examples": fit.n,
    }  # fmt: skip


def outcomes(cells: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, float]]:
    """Test accuracy by method of every pair and seed that plain fine-tuning has run on."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for cell in cells:
        if cell["method"] in ("nlft", *LINEAR) and not cell.get("change"):
            found.setdefault((cell["pair"], cell["seed"]), {})[cell["method"]] = cell["accuracy"]
    return {key: scores for key, scores in found.items() if "nlft" in scores}


def decided(cells: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """Cells with a winner, as the functions of ``experiments.kernels.verdict`` take them."""
    own = [{**c, "linear": c[method], "plain": c["nlft"]} for c in cells if c.get(method) is not None]
    return [c for c in own if c["linear"] != c["plain"]]


def judged(cells: list[dict[str, Any]], fits: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A line for each measure and each kind of linear fine-tuning, with cuts from other fits."""
    rows, facts = [], {}
    others = [c for c in fits if c["linear"] != c["plain"]]
    for method in LINEAR:
        own = decided(cells, method)
        wins = [c["linear"] > c["plain"] for c in own]
        rows.append([method, "always plain", *counted(len(own) - sum(wins), len(own)), "", ""])
        rows.append([method, "always linear", *counted(sum(wins), len(own)), "", ""])
        for m, words in MEASURES.items():
            cut, above = threshold([c[m] for c in others], [c["linear"] > c["plain"] for c in others])
            right = sum(((c[m] > cut) == above) == win for c, win in zip(own, wins, strict=True))
            rule = f"{'over' if above else 'under'} {cut:.2g}"
            rows.append([method, words, *counted(right, len(own)), rule, f"{area(own, m):.2f}"])
            facts[f"{method}, {m}"] = {"right": right, "of": len(own), "cut": cut, "above": above}
    header = ["linear", "predicted by", "right", "% (95 %)", "linear wins where", "area under ROC"]
    return markdown(header, rows), facts


def listed(cells: Sequence[dict[str, Any]]) -> str:
    """Every pair and seed."""
    rows = [
        [
            c["pair"], str(c["seed"]),
            *(f"{100 * c[m]:.1f}" if c.get(m) is not None else "–" for m in ("nlft", *LINEAR)),
            f"{100 * c['explained']:.0f}", f"{100 * c['accuracy']:.0f}", f"{c['lift']:.1f}",
            f"{c['gap']:.1f}", c["verdict"],
        ]
        for c in cells
    ]  # fmt: skip
    header = ["pair", "seed", "nlft", *LINEAR, "explained %", "leave-one-out %", "lift", "gap", "verdict"]
    return markdown(header, rows)


def main(words: list[str] | None = None, pairs: Sequence[Pair] = PAIRS) -> None:
    """Entry point."""
    options = parser(__doc__ or "")
    options.add_argument("--outcomes", type=Path, nargs="*", default=None, help="later files take precedence")
    options.add_argument("--known", type=Path, default=KNOWN)
    arguments = options.parse_args(words)
    files = arguments.outcomes or [file for file in PLACES if file.exists()] or PLACES[1:]
    scores = outcomes([cell for file in files for cell in known(file, "experiments.lqf.pairs")])
    study, cells = Study("kernels/verdict_pairs", arguments), []
    for pair in pairs:
        for seed in study.seeds:
            if (pair.name, seed) not in scores:
                continue
            what = {"pair": pair.name, "shots": pair.shots, "seed": seed}
            cell = study.cell(what, lambda p=pair, s=seed: measured(p, s, arguments.data_dir))
            cells.append({**cell, **scores[pair.name, seed]})
    table, facts = judged(cells, known(arguments.known))
    study.publish(f"{listed(cells)}\n\n{table}", cells, **facts)


if __name__ == "__main__":
    main()
