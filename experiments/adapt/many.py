"""``linnet.adapt`` to many samples: along landmarks, beside the kernel of all, and a logistic regression.

    python -m experiments.adapt.many --threads 1

More than 10,000 samples are fitted in the weights of features along 4,096 of them (``nested/landmarks.py``).
Here as many landmarks as are named, or all samples by their kernel, at sizes where both can be had, and the
default at all samples of the set; accuracies on test samples, and of samples left out of the fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from sklearn.linear_model import LogisticRegression

import linnet
from experiments.adapt.tasks import DEVELOPMENT, MANY, NETWORKS, Network, Task, samples, stored
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.fitting.last_layer import ending_linear, features
from linnet.nested import many as in_weights
from linnet.nested import nested_fit

PAIRS = (("resnet20", "Fashion-MNIST"), ("resnet20", "MNIST"), ("minilm6", "spoken requests"))
TASKS = {task.name: task for task in (*DEVELOPMENT, *MANY)}
SIZES = ((8000, 0), (8000, 1024), (8000, 2048), (8000, 4096), (14_953, 4096), (20_000, 4096), (60_000, 4096))
PENALTIES = (0.1, 1.0, 10.0, 100.0)  # C of the regression on standardized features, by a fifth held out
TESTED = 4000


def cell(
    network: Network, task: Task, count: int, landmarks: int, seed: int, data_dir: str | None
) -> dict[str, Any]:
    """A fit, or for -1 landmarks the regression."""
    model, prepared = network.load(data_dir)
    found = stored(task, data_dir)
    draw = torch.Generator().manual_seed(seed)
    at, test = (torch.randperm(len(y), generator=draw) for y in (found.train_y, found.test_y))
    at, test = at[:count], test[:TESTED]
    x, xt = (samples(part[rows.numpy()], network, prepared) for part, rows in (
        (found.train_x, at), (found.test_x, test)))  # fmt: skip
    y, truth = found.train_y[at], found.test_y[test]
    start = time.process_time()
    if landmarks < 0:
        right = regressed(model, x, y, xt)
        return {
            "accuracy": float((right == truth).double().mean()),
            "core seconds": time.process_time() - start,
        }
    most = mock.patch.object(nested_fit, "MANY", 0 if landmarks else count)
    with most, mock.patch.object(in_weights, "LANDMARKS", landmarks or in_weights.LANDMARKS):
        fit = linnet.adapt(model, (x, y))
        seconds = time.process_time() - start
        left_out = float((fit.loo().argmax(1) == y).double().mean())
    predicted = fit.predictive(xt)
    return {
        "accuracy": float((predicted.mean.argmax(1) == truth).double().mean()),
        "left out": left_out,
        "nll": float(-predicted.probs.clamp_min(1e-12).log().gather(1, truth[:, None]).mean()),
        "ridge": fit.ridge,
        "earlier": fit.earlier,
        "core seconds": seconds,
    }


def regressed(model: torch.nn.Module, x: Any, y: torch.Tensor, xt: Any) -> torch.Tensor:
    """Classes by a logistic regression on the features of the last layer."""
    model = ending_linear(model, x)
    phi, test = (features(model, part).double() for part in (x, xt))
    mean, spread = phi.mean(0), phi.std(0).clamp_min(1e-12)
    phi, test = ((one - mean) / spread for one in (phi, test))
    held = torch.arange(len(y)) % 5 == 0

    def trained(penalty: float, rows: torch.Tensor) -> LogisticRegression:
        return LogisticRegression(C=penalty / len(rows), max_iter=500).fit(phi[rows].numpy(), y[rows].numpy())

    some = (~held).nonzero()[:, 0]
    scores = [trained(c, some).score(phi[held].numpy(), y[held].numpy()) for c in PENALTIES]
    best = PENALTIES[max(range(len(scores)), key=scores.__getitem__)]
    return torch.from_numpy(trained(best, torch.arange(len(y))).predict(test.numpy()))


def named(landmarks: int) -> str:
    """What a table calls a fit."""
    return {-1: "logistic regression", 0: "kernel of all"}.get(landmarks, f"{landmarks:,} landmarks")


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each set, size and fit."""
    rows = []
    for where in dict.fromkeys((c["task"], c["network"], c["samples"], c["landmarks"]) for c in cells):
        task, network, count, landmarks = where
        own = [c for c in cells if (c["task"], c["network"], c["samples"], c["landmarks"]) == where]
        every = {c["seed"]: c for c in cells if (c["task"], c["samples"], c["landmarks"]) == (task, count, 0)}
        gains = [100 * (c["accuracy"] - every[c["seed"]]["accuracy"]) for c in own if c["seed"] in every]
        fits = landmarks >= 0
        rows.append([
            f"{task}, {network}, {count:,}", named(landmarks), len(own),
            with_error(100 * c["accuracy"] for c in own),
            with_error(gains) if gains and landmarks else "–",
            with_error(100 * (c["left out"] - c["accuracy"]) for c in own) if fits else "–",
            f"{sum(c['nll'] for c in own) / len(own):.3f}" if fits else "–",
            f"{sum(c['core seconds'] for c in own) / len(own):.0f}",
        ])  # fmt: skip
    header = ["samples", "fit", "draws", "accuracy, %", "less that of the kernel of all",
              "left-out accuracy less it", "log loss", "seconds of a core"]  # fmt: skip
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=3)
    options.add_argument("--networks", nargs="+", default=[name for name, _ in PAIRS])
    given = options.parse_args(argv)
    study, cells = Study("adapt/many", given), []
    for key, name in PAIRS:
        if key not in given.networks:
            continue
        network, task = NETWORKS[key], TASKS[name]
        most = len(stored(task, given.data_dir).train_y)
        sizes = [(count, landmarks) for count, landmarks in SIZES if count <= most]
        sizes += [(count, -1) for count in dict.fromkeys(count for count, _ in sizes)]
        for count, landmarks in sizes:
            if count == 14_953 and not task.text:
                continue
            for seed in study.seeds if count < most else study.seeds[:1]:
                where = {"network": network.name, "task": name, "samples": count}
                run = partial(cell, network, task, count, landmarks, seed, given.data_dir)
                cells.append(study.cell({**where, "landmarks": landmarks, "seed": seed}, run))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
