"""Entropy of right and wrong predictions of pretrained networks (Botev 2020, table 5.2, figure 5.5).

The thesis trains wide residual networks on CIFAR-100 (deterministic 79.18 %, Kronecker Laplace 79.36 %;
with dropout 79.12 %, MC dropout 79.20 %, Kronecker Laplace 79.10 %) and shows the share of right and of
wrong predictions whose entropy is above c: Laplace and dropout raise both alike. Here networks that others
have trained take their place: DenseNet-BC on CIFAR-100 and ResNet-20 on CIFAR-10, on subsets of both; they
have no dropout. BatchNorm keeps its running statistics and its scales and offsets get a diagonal block of
their own, as in the thesis. N and λ are chosen on one part of the test images and judged on the other, as
there. "last layer" is the same for the last layer alone, its predictions in closed form (linearized)
instead of by sampled networks. A seed draws the images of all parts and the sampled networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from experiments.figures import COLORS, figure, save
from experiments.laplace.networks import Sampled
from experiments.sources import Images, images, pixels, pretrained
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.curvatures import MonteCarlo
from linnet.likelihoods import Categorical

NETWORKS = {"resnet20": "cifar10_10k_5k", "densenet": "cifar100_5k_2k"}
TITLES = {"resnet20": "ResNet-20", "densenet": "DenseNet-BC"}
SCALES, PRIORS = (1.0, 10.0, 100.0, 1000.0), (1.0, 10.0, 100.0, 1000.0, 1e4)
METHODS = ("deterministic", "Kronecker Laplace", "last layer")
POINTS = 41
PAPER = "thesis, wide ResNet on CIFAR-100: deterministic 79.18 %, Kronecker Laplace 79.36 %"


def judged(predict: Any, data: tuple[Tensor, Tensor], batch: int) -> dict[str, Any]:
    """Scores, and curves of entropy for right and wrong predictions."""
    report = linnet.evaluate(predict, data, batch_size=batch)
    examples = report.examples
    top = float(torch.tensor(float(report.classes)).log())
    grid = torch.linspace(0, top, POINTS, dtype=torch.float64)
    share = {
        name: [float((examples.entropy[which] > c).double().mean()) for c in grid]
        for name, which in (("correct", examples.correct), ("wrong", ~examples.correct))
    }
    return {
        "accuracy": report.accuracy, "nll": report.nll, "ece": report.ece,
        "entropy_correct": report.entropy_correct, "entropy_wrong": report.entropy_wrong,
        "threshold": grid.tolist(), **share,
    }  # fmt: skip


def tuned(la: linnet.Laplace, data: tuple[Tensor, Tensor], how: str, samples: int) -> linnet.Laplace:
    """N and λ by the likelihood of held-out images."""
    held_out = DataLoader(TensorDataset(*data), len(data[0]))
    grid = linnet.Grid(prior_precision=PRIORS, data_scale=SCALES, predict=how, samples=samples)
    la.tune("grid", held_out, search=grid)
    return la


def run(
    method: str, model: nn.Module, parts: dict[str, tuple[Tensor, Tensor]], given: Any, seed: int
) -> dict[str, Any]:
    """One way to predict."""
    if method == "deterministic":
        return judged(lambda x: model(x).softmax(1), parts["test"], given.batch)
    if method == "last layer":
        last = linnet.Laplace(model, Categorical(), "kfac", params="last-layer").fit(parts["train"])
        tuned(last, parts["validation"], "glm", given.samples)
        facts = {"prior": float(last.prior_precision), "scale": last.data_scale}  # type: ignore[arg-type]
        return judged(lambda x: last.predictive(x), parts["test"], given.batch) | facts
    # one label an image is drawn for the factors, as KFAC does: 100 classes have 99 columns otherwise
    la = linnet.Laplace(
        model,
        Categorical(),
        "kfac",
        1.0,
        damping="matrix-normal",
        params="all",
        expectation=MonteCarlo(seed=seed),
    )
    la.fit(parts["train"])
    few = tuple(t[: given.tuning] for t in parts["validation"])
    tuned(la, (few[0], few[1]), "mc", 5)
    drawn = Sampled(model, la.sample(given.samples, seed))
    facts = {"prior": float(la.prior_precision), "scale": la.data_scale}  # type: ignore[arg-type]
    return judged(drawn, parts["test"], given.batch) | facts


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Figure 5.5: solid where right, dashed where wrong."""
    picture, axes = figure(columns=2, width=3.6, height=3.0)
    for ax, name in zip(axes, dict.fromkeys(c["network"] for c in cells), strict=False):
        for color, method in zip(COLORS, METHODS, strict=False):
            own = [c for c in cells if c["network"] == name and c["method"] == method]
            for kind, style in (("correct", "-"), ("wrong", "--")):
                curve = torch.tensor([c[kind] for c in own]).mean(0)
                label = method if kind == "correct" else None
                ax.plot(own[0]["threshold"], curve, style, color=color, label=label)
        title = f"{TITLES[name]} (right: solid, wrong: dashed)"
        ax.set(xlabel="entropy c (nats)", ylabel="share above c", title=title)
    axes[0].legend(fontsize=8)
    save(picture, file)


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    options.add_argument("--train", type=int, default=500, help="images that curvature is summed over")
    options.add_argument("--validation", type=int, default=300)
    options.add_argument("--tuning", type=int, default=50, help="of these, for sampled networks")
    options.add_argument("--test", type=int, default=400)
    options.add_argument("--samples", type=int, default=10, help="sampled networks")
    options.add_argument("--batch", type=int, default=100)
    given = options.parse_args(arguments)
    if given.full:
        given.train, given.validation, given.tuning, given.test, given.samples = 5000, 1000, 1000, 4000, 100
    study = Study("laplace/pretrained", given)
    cells = []
    for name in given.networks:
        sets = images(NETWORKS[name], given.data_dir)
        model, normalization = pretrained(name, given.data_dir)
        model = model.to(given.device)
        for seed in study.seeds:
            parts = drawn(sets, normalization, given, seed)
            for method in METHODS:
                what = {"network": name, "method": method, "seed": seed, "train": given.train,
                        "validation": given.validation, "tuning": given.tuning, "test": len(parts["test"][0]),
                        "samples": given.samples}  # fmt: skip
                cells.append(
                    study.cell(what, lambda m=method, p=parts, n=model, s=seed: run(m, n, p, given, s))
                )
    study.publish(table(cells), cells, published=PAPER)
    draw(cells, study.out / "pretrained.svg")


def drawn(sets: Images, normalization: Any, given: Any, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The images of a seed: of the curvature, of the choice of N and λ, and of the test."""

    def order(labels: Tensor, of: int) -> Tensor:
        return torch.randperm(len(labels), generator=torch.Generator().manual_seed(of))

    def part(x: Any, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return pixels(x[at.numpy()], normalization).to(given.device), y[at].to(given.device)

    cut = given.validation
    tests = order(sets.test_y, 2 * seed)
    return {
        "validation": part(sets.test_x, sets.test_y, tests[:cut]),
        "test": part(sets.test_x, sets.test_y, tests[cut : cut + given.test]),
        "train": part(sets.train_x, sets.train_y, order(sets.train_y, 2 * seed + 1)[: given.train]),
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: every method of every network."""
    rows = []
    for name in dict.fromkeys(c["network"] for c in cells):
        for method in METHODS:
            own = [c for c in cells if c["network"] == name and c["method"] == method]
            keys = (("accuracy", 2, 100), ("nll", 3, 1), ("ece", 3, 1), ("entropy_correct", 3, 1),
                    ("entropy_wrong", 3, 1))  # fmt: skip
            values = [with_error([c[key] for c in own], digits, scale) for key, digits, scale in keys]
            hyper = sorted({f"{c['scale']:g}, {c['prior']:g}" for c in own if "scale" in c})
            rows.append([f"{TITLES[name]}: {method}", len(own), *values, " or ".join(hyper) or "–"])
    header = [
        "network and method",
        "seeds",
        "accuracy %",
        "NLL",
        "ECE",
        "entropy, right",
        "entropy, wrong",
        "N / images, λ",
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
