"""Can cross-validation on the training samples name the winner of the linear fit and plain fine-tuning?

The fits of ``experiments.kernels.verdict``, asked again without a test sample: in each of five folds the
linear fit forgets the fold (exactly, by algebra) and predicts it, and plain fine-tuning of the rest does the
same, its learning rate chosen within the rest. The prediction is "linear wins" where the linear fit names
more held-out samples rightly; nothing is chosen by looking at other tasks. Ties go to plain fine-tuning. A
second score is the mean reciprocal rank of the right class, which has fewer ties.

The winners on test samples are those that ``experiments.kernels.verdict`` has found; run it first.

    python -m experiments.kernels.verdict_folds --threads 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.kernels.verdict import area, interval, resampled, source_network, target
from experiments.study import ROOT, Study, parser, read_cells
from experiments.tables import markdown
from linnet.fitting.descent import fine_tune

KNOWN = ROOT / "runs" / "experiments" / "kernels" / "verdict" / "cells.jsonl"
FOLDS = 5
RATES = (0.01, 0.03, 0.1)
WHAT = ("source", "target", "shots", "seed", "steps", "pretraining", "tests_asked")
SCORES = {"right": "accuracy", "rank": "reciprocal rank of the right class"}


def ranks(outputs: Tensor, y: Tensor) -> Tensor:
    """One over the rank of the right class among the outputs (N, C)."""
    own = outputs.gather(1, y[:, None])
    return 1 / (1 + (outputs > own).sum(1)).double()


def held_out(model: nn.Module, x: Tensor, y: Tensor, steps: int, seed: int) -> dict[str, float]:
    """Scores of both on samples that they were not fitted to."""
    fit = linnet.fit(linnet.linearize(model), (x, y), ridge="loo")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    linear, plain = (torch.zeros(len(y), int(y.max()) + 1) for _ in range(2))
    for held in order.tensor_split(FOLDS):
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[held] = False
        linear[held] = fit.forget(held).predict(x[held]).float()
        tuned = fine_tune(model, (x[rest], y[rest]), steps, 32, RATES, seed=seed)
        plain[held] = tuned.predict(x[held])
    found: dict[str, float] = {}
    for name, f in (("linear", linear), ("plain", plain)):
        found[f"{name} right"] = float((f.argmax(1) == y).double().mean())
        found[f"{name} rank"] = float(ranks(f, y).mean())
    return found


def known(file: Path, script: str = "experiments.kernels.verdict") -> list[dict[str, Any]]:
    """The cells that a script has found: from its ``cells.jsonl``, or from a ``result.json``."""
    if not file.exists():
        raise SystemExit(f"{file} is not there: run python -m {script} first")
    return read_cells(file)


def judged(cells: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A line for each score, on all decided fits and on those decided beyond two standard errors."""
    rows, facts = [], {}
    for words, least in (("all", 0.0), ("beyond two standard errors", 2.0)):
        own = [c for c in cells if abs(c["linear"] - c["plain"]) > least * c["error"]]
        wins = sum(c["linear"] > c["plain"] for c in own)
        rows.append([words, "always plain", *counted(len(own) - wins, len(own)), ""])
        for score, name in SCORES.items():
            for c in own:
                c[score] = c[f"linear {score}"] - c[f"plain {score}"]
            right = sum((c[score] > 0) == (c["linear"] > c["plain"]) for c in own)
            curve = area(own, score)
            low, high = resampled(own, score) if not math.isnan(curve) else (math.nan, math.nan)
            rows.append([words, name, *counted(right, len(own)), f"{curve:.2f} ({low:.2f} to {high:.2f})"])
            facts[f"{words}, {score}"] = {
                "right": right,
                "of": len(own),
                "area": curve,
                "interval": (low, high),
            }
    return markdown(["fits", "predicted by", "right", "% (95 %)", "area under ROC"], rows), facts


def counted(right: int, total: int) -> list[str]:
    """A count, and its share with the exact interval."""
    if not total:
        return ["0 of 0", "–"]
    low, high = interval(right, total)
    return [f"{right} of {total}", f"{100 * right / total:.0f} ({100 * low:.0f} to {100 * high:.0f})"]


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--known", type=Path, default=KNOWN)
    options.add_argument("--sources", nargs="*", default=None, help="networks (default: all that are known)")
    arguments = options.parse_args(words)
    study, cells = Study("kernels/verdict_folds", arguments), []
    networks: dict[tuple[str, int], Any] = {}
    for fit in known(arguments.known):
        if arguments.sources is not None and fit["source"] not in arguments.sources:
            continue
        what = {**{name: fit[name] for name in WHAT}, "folds": FOLDS, "rates": list(RATES)}

        def compute(fit: dict[str, Any] = fit) -> dict[str, float]:
            key = (fit["source"], fit["pretraining"])
            if key not in networks:
                networks[key] = source_network(fit["source"], arguments.data_dir, 8, fit["pretraining"])
            network, norm = networks[key]
            seed = fit["seed"]
            x, y, *_ = target(fit["target"], arguments.data_dir, fit["shots"], seed, norm, fit["tests_asked"])
            generator = torch.Generator().manual_seed(seed)
            model = linnet.with_head(network, int(y.max()) + 1, init="random", seed=generator)
            return held_out(model, x, y, fit["steps"], seed)

        tested = {name: fit[name] for name in ("linear", "plain", "error", "explained")}
        cells.append({**study.cell(what, compute), **tested})
    table, facts = judged(cells)
    study.publish(table, cells, **facts)


if __name__ == "__main__":
    main()
