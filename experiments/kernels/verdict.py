"""Test of `linnet spectrum`: does its verdict predict which of linear and plain fine-tuning wins?

Not a figure of the paper, but what its findings promise: a task that is aligned with the kernel favors the
linear model. Networks trained on one data set are fitted to another with a few shots a class: by the
linear fit (ridge by leave-one-out) and by plain fine-tuning of all weights (learning rate on held-out
samples), both from the same random head. Before any test sample is seen, ``linnet.spectrum.task_linearity``
measures the task on the training samples.

Each measure is taken as a prediction of "linear wins" by one threshold, chosen on all other targets and
applied to the one left out. Reported: the share of right predictions with its exact 95 % interval, beside
always naming the more frequent winner, and the area under the ROC curve with an interval that resamples
whole source-target pairs.

    python -m experiments.kernels.verdict --threads 1
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.figures import COLORS, figure, save
from experiments.kernels.networks import lenet
from experiments.sources import HALF, images, pixels, pretrained, shots
from experiments.study import Study, parser
from experiments.tables import markdown
from linnet import spectrum
from linnet.fitting.descent import fine_tune

SOURCES = ("mnist", "fashion_mnist", "cifar10_10k_5k", "resnet20")
TARGETS = (
    "mnist", "fashion_mnist", "notmnist_test10k", "eurosat_1000_500", "cifar10_10k_5k", "flowers_64",
    "cifar100_5k_2k",
)  # fmt: skip
CLASSES = 10  # of a target with more, these are drawn
SHOTS = (5, 20)
MEASURES = {  # name: in words
    "explained": "leave-one-out variance explained",
    "accuracy": "leave-one-out accuracy",
    "concentration": "concentration on the top 50",
    "lift": "alignment over random labels",
    "dimension": "effective dimension over examples",
    "gap": "linearity gap",
}


def source_network(name: str, data_dir: str | None, epochs: int, samples: int) -> tuple[nn.Module, Any]:
    """A network trained on its data set, and the normalization of its images."""
    if name == "resnet20":
        return pretrained(name, data_dir)
    data = images(name, data_dir)
    x, y = pixels(data.train_x[:samples], HALF, side=32, channels=3), data.train_y[:samples]
    torch.manual_seed(0)
    model = lenet(outputs=data.classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval(), HALF


def target(
    name: str, data_dir: str | None, per_class: int, seed: int, normalization: Any, tests: int
) -> tuple[Tensor, ...]:
    """Training images and labels, test images and labels, of at most ten classes."""
    data = images(name, data_dir)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randperm(data.classes, generator=generator)[:CLASSES].sort().values
    train = shots(data.train_y, per_class, seed)
    train = train[torch.isin(data.train_y[train], classes)]
    test = torch.isin(data.test_y, classes).nonzero()[:, 0]
    test = test[torch.randperm(len(test), generator=generator)[:tests]]
    parts: list[Tensor] = []
    for x, y, index in ((data.train_x, data.train_y, train), (data.test_x, data.test_y, test)):
        chosen = x[index.numpy()]
        parts += [pixels(chosen, normalization, side=32, channels=3), torch.searchsorted(classes, y[index])]
    return tuple(parts)


def cell(network: nn.Module, data: tuple[Tensor, ...], seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Both kinds of fine-tuning, and what was known before."""
    x, y, x_test, y_test = data
    classes = int(y.max()) + 1
    model = linnet.with_head(network, classes, init="random", seed=torch.Generator().manual_seed(seed))
    fit = linnet.fit(linnet.linearize(model), (x, y), ridge="loo")
    known = spectrum.task_linearity(fit)
    tuned = fine_tune(model, (x, y), steps, batch, seed=seed)
    right = {
        "linear": fit.predict(x_test).argmax(1) == y_test,
        "plain": tuned.predict(x_test).argmax(1) == y_test,
    }
    different = right["linear"].double() - right["plain"].double()
    held = known.held_out
    assert held is not None
    assert held.accuracy is not None
    return {
        "linear": float(right["linear"].double().mean()), "plain": float(right["plain"].double().mean()),
        "error": float(different.std() / math.sqrt(len(different))), "tests": len(y_test),
        "explained": held.explained, "accuracy": held.accuracy, "concentration": known.concentration,
        "lift": known.lift, "dimension": known.effective_dimension / len(x), "gap": known.gap.training,
        "examples": len(x), "verdict": known.verdict.level,
    }  # fmt: skip


def threshold(values: Sequence[float], wins: Sequence[bool]) -> tuple[float, bool]:
    """The cut, and whether larger values mean a win, that are right most often."""
    best = (-1.0, 0.0, True)
    ordered = sorted(set(values))
    cuts = [
        ordered[0] - 1,
        *((a + b) / 2 for a, b in pairwise(ordered)),
        ordered[-1] + 1,
    ]
    for cut in cuts:
        for above in (True, False):
            right = sum(((v > cut) == above) == w for v, w in zip(values, wins, strict=True))
            best = max(best, (right, cut, above))
    return best[1], best[2]


def left_out(cells: Sequence[dict[str, Any]], measure: str) -> int:
    """Right predictions when the threshold is chosen without the target that is predicted."""
    right = 0
    for name in {c["target"] for c in cells}:
        others = [c for c in cells if c["target"] != name]
        cut, above = threshold([c[measure] for c in others], [c["linear"] > c["plain"] for c in others])
        own = [c for c in cells if c["target"] == name]
        right += sum(((c[measure] > cut) == above) == (c["linear"] > c["plain"]) for c in own)
    return right


def area(cells: Sequence[dict[str, Any]], measure: str) -> float:
    """Area under the ROC curve: how often a linear win has the larger value than a plain win."""
    first = [c[measure] for c in cells if c["linear"] > c["plain"]]
    second = [c[measure] for c in cells if c["linear"] < c["plain"]]
    pairs = [(a > b) + 0.5 * (a == b) for a in first for b in second]
    return sum(pairs) / len(pairs) if pairs else math.nan


def resampled(cells: Sequence[dict[str, Any]], measure: str, draws: int = 500) -> tuple[float, float]:
    """95 % interval of the area, source-target pairs drawn with replacement."""
    pairs = sorted({(c["source"], c["target"]) for c in cells})
    generator, found = random.Random(0), []
    for _ in range(draws):
        taken = generator.choices(pairs, k=len(pairs))
        value = area([c for pair in taken for c in cells if (c["source"], c["target"]) == pair], measure)
        found += [] if math.isnan(value) else [value]
    found.sort()
    return (found[len(found) // 40], found[-1 - len(found) // 40]) if found else (math.nan, math.nan)


def interval(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share: exact, at least its level for any true share."""
    tail = (1 - level) / 2
    # P(X ≥ right; low) = tail and P(X ≤ right; high) = tail
    low = 0.0 if right == 0 else _root(lambda p: 1 - _at_most(right - 1, total, p) - tail)
    high = 1.0 if right == total else _root(lambda p: tail - _at_most(right, total, p))
    return low, high


def _at_most(count: int, total: int, p: float) -> float:
    """P(X ≤ count) of a binomial X."""
    return sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(count + 1))


def _root(increasing: Callable[[float], float]) -> float:
    """Where an increasing function crosses zero between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return (low + high) / 2


def judged(cells: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A line for each measure, and what it rests on."""
    decided = [c for c in cells if c["linear"] != c["plain"]]
    wins = [c["linear"] > c["plain"] for c in decided]
    facts: dict[str, Any] = {"linear_wins": sum(wins), "decided": len(decided)}
    entries = [("always the more frequent winner", max(sum(wins), len(wins) - sum(wins)), "")]
    for m, words in MEASURES.items():
        right, (low, high) = left_out(decided, m), resampled(decided, m)
        entries.append((words, right, f"{area(decided, m):.2f} ({low:.2f} to {high:.2f})"))
        cut = threshold([c[m] for c in decided], wins)
        facts[m] = {"right": right, "area": area(decided, m), "interval": (low, high), "threshold": cut}
    rows = []
    for words, count, curve in entries:
        low, high = interval(count, len(decided)) if decided else (0.0, 1.0)
        share = 100 * count / len(decided) if decided else math.nan
        rows.append(
            [words, f"{count} of {len(decided)}", f"{share:.0f} ({100 * low:.0f} to {100 * high:.0f})", curve]
        )
    return markdown(["predicted by", "right", "% (95 %)", "area under ROC"], rows), facts


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    """The advantage of the linear fit against two measures."""
    drawn, axes = figure(3, height=2.8, width=3.4)
    for panel, m in zip(axes, ("explained", "lift", "gap"), strict=True):
        for color, source in zip(COLORS, SOURCES, strict=False):
            own = [c for c in cells if c["source"] == source]
            advantage = [100 * (c["linear"] - c["plain"]) for c in own]
            errors = [100 * c["error"] for c in own]
            panel.errorbar(
                [c[m] for c in own], advantage, errors, fmt="o", ms=3, lw=0.7, color=color, label=source
            )
        panel.axhline(0, color="gray", lw=0.8)
        panel.set(xlabel=MEASURES[m], xscale="linear" if m == "explained" else "log")
    axes[0].set_ylabel("linear less plain, test accuracy (%)")
    axes[0].legend(fontsize=6)
    save(drawn, out / "verdict.svg")


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--sources", nargs="*", default=None, help="networks (default: all)")
    options.add_argument("--targets", nargs="*", default=list(TARGETS))
    options.add_argument("--shots", nargs="*", type=int, default=list(SHOTS))
    options.add_argument("--tests", type=int, default=1000, help="test images (default %(default)s)")
    options.add_argument(
        "--steps", type=int, default=150, help="steps of plain fine-tuning (default %(default)s)"
    )
    options.add_argument("--pretraining", type=int, default=5000, help="images a LeNet is trained on first")
    arguments = options.parse_args(words)
    study, cells = Study("kernels/verdict", arguments), []
    sources = arguments.sources or list(SOURCES if not arguments.full else (*SOURCES, "resnet56", "densenet"))
    for source in sources:
        network, normalization = source_network(source, arguments.data_dir, 8, arguments.pretraining)
        large = not source.startswith(("mnist", "fashion", "cifar"))
        for name in arguments.targets:
            for per_class in arguments.shots[:1] if large and not arguments.full else arguments.shots:
                for seed in study.seeds:
                    if name == source:
                        continue
                    steps = arguments.steps if not large or arguments.full else min(arguments.steps, 60)
                    batch = 32 if not large or arguments.full else 16
                    what = {
                        "source": source, "target": name, "shots": per_class, "seed": seed, "steps": steps,
                        "pretraining": arguments.pretraining, "tests_asked": arguments.tests,
                    }  # fmt: skip

                    def compute(
                        n: str = name, k: int = per_class, s: int = seed, net: nn.Module = network,
                        norm: Any = normalization, count: int = steps, b: int = batch,
                    ) -> dict[str, Any]:  # fmt: skip
                        data = target(n, arguments.data_dir, k, s, norm, arguments.tests)
                        return cell(net, data, s, count, b)

                    cells.append(study.cell(what, compute))
    table, facts = judged(cells)
    study.publish(table, cells, **facts)
    draw(cells, study.out)


if __name__ == "__main__":
    main()
