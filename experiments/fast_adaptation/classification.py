"""Bayesian classification with a linearized residual network (Maddox et al. 2021, figures A.3 and A.4).

PreResNets on CIFAR-10, linearized with the network's own output term ("NN", f₀ + J δ) and without it
("finite NTK", J δ alone), their weights inferred by MAP, stochastic variational inference (SVI: ten epochs
of Adam at 10⁻³) and Laplace (Fisher information, Lanczos draws), prior N(0, 1). Figure A.3 has accuracy,
NLL and calibration error against depth over 10 seeds: the three methods hardly differ. Figure A.4 transfers
to STL10, where Laplace on the Jacobian alone nearly matches a network without fine-tuning, the full
expansion is somewhat better than no adaptation, and SVI did not converge. STL10 is not among the data here;
the second domain is CIFAR-10 in gray. One small network and few images are the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.fast_adaptation.networks import PreResNet
from experiments.figures import COLORS, figure, save
from experiments.sources import CIFAR, images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.likelihoods import Categorical

INFERENCES = ("map", "svi", "laplace")
DOMAINS = ("CIFAR-10", "gray CIFAR-10")


def trained(data: tuple[Tensor, Tensor], depth: int, width: int, epochs: int, seed: int) -> nn.Module:
    """SGD with momentum, random flips and weight decay; the rate annealed to zero."""
    torch.manual_seed(seed)
    model = PreResNet(depth, width)
    steps = epochs * -(-len(data[0]) // 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(data[0])).split(128):
            x = data[0][index].flip(3) if torch.rand(()) < 0.5 else data[0][index]
            loss = F.cross_entropy(model(x), data[1][index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def judged(predict: Any, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy, NLL and calibration error."""
    report = linnet.evaluate(predict, test, batch_size=100)
    return {"accuracy": report.accuracy, "nll": report.nll, "ece": report.ece}


def as_it_is(model: nn.Module, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The network without any inference."""
    return judged(lambda x: model(x).softmax(1), test)


def inferred(
    model: nn.Module, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], method: str, base: bool,
    given: Any, seed: int,
) -> dict[str, float]:  # fmt: skip
    """One posterior of the linear model."""
    how: dict[str, linnet.Newton | linnet.SVI] = {
        "map": linnet.Newton(tolerance=1e-2),
        "laplace": linnet.Newton(tolerance=1e-2, samples=given.samples),
        "svi": linnet.SVI(training=linnet.Training(epochs=given.svi_epochs)),
    }
    posterior = linnet.linear_posterior(
        linnet.linearize(model), data, Categorical(), how[method], base=base, prior_precision=given.precision,
        seed=seed,
    )  # fmt: skip
    facts = {} if posterior.optimum is None else {"newton_steps": posterior.optimum.steps}
    if posterior.bounds:
        facts = {"first_bound": posterior.bounds[0], "last_bound": posterior.bounds[-1]}
    return judged(lambda x: posterior.predictive(x), test) | facts


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Accuracy and NLL of every method, both domains."""
    drawn, axes = figure(columns=2, rows=2, width=3.6, height=2.4)
    for row, key in zip(axes, ("accuracy", "nll"), strict=True):
        for ax, domain in zip(row, DOMAINS, strict=True):
            own = [c for c in cells if c["domain"] == domain]
            names = list(dict.fromkeys(c["method"] for c in own))
            values = [[c[key] for c in own if c["method"] == name] for name in names]
            colors = [COLORS[0] if "NN" in n else COLORS[1] if "NTK" in n else COLORS[2] for n in names]
            ax.barh(names, [sum(v) / len(v) for v in values], color=colors)
            ax.set(xlabel="NLL (nats)" if key == "nll" else key, title=domain)
            ax.tick_params(axis="y", labelsize=7)
    save(drawn, study.out / "classification.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--depth", type=int, default=8)
    options.add_argument("--width", type=int, default=8)
    options.add_argument("--train", type=int, default=4000, help="images that the network is trained on")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument(
        "--linear", type=int, default=300, help="of these, images that the linear model sees"
    )
    options.add_argument("--test", type=int, default=500)
    options.add_argument("--svi-epochs", type=int, default=10)
    options.add_argument("--samples", type=int, default=10, help="draws of Laplace")
    options.add_argument("--precision", type=float, default=1.0)
    options.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    given = options.parse_args(arguments)
    if given.full:
        given.depth, given.width, given.train, given.epochs, given.linear = 56, 16, 10_000, 200, 10_000
        given.test = 5000
    study = Study("fast_adaptation/classification", given)
    sets = images("cifar10_10k_5k", given.data_dir)
    cells = []
    for seed in study.seeds:
        order = torch.randperm(len(sets.train_y), generator=torch.Generator().manual_seed(seed))[
            : given.train
        ]
        color, y = pixels(sets.train_x[order.numpy()]), sets.train_y[order]
        test_color, test_y = pixels(sets.test_x[: given.test]), sets.test_y[: given.test]
        mean, deviation = (torch.tensor(part).view(1, 3, 1, 1) for part in CIFAR)
        colored = (color - mean) / deviation, y  # the network is trained on the first domain
        made: list[nn.Module] = []

        def network(data: Any = colored, seed: int = seed, made: list[nn.Module] = made) -> nn.Module:
            if not made:
                made.append(trained(data, given.depth, given.width, given.epochs, seed))
            return made[0]

        for domain in given.domains:
            x, test_x = (
                ((v if domain == DOMAINS[0] else v.mean(1, keepdim=True).expand_as(v)) - mean) / deviation
                for v in (color, test_color)
            )

            few, test = (x[: given.linear], y[: given.linear]), (test_x, test_y)
            shared = {"domain": domain, "seed": seed, "depth": given.depth, "width": given.width,
                      "train": given.train, "epochs": given.epochs, "linear": given.linear,
                      "test": given.test, "samples": given.samples, "precision": given.precision}  # fmt: skip
            alone = lambda t=test, n=network: as_it_is(n(), t)  # noqa: E731
            cells.append(study.cell({"method": "network", **shared}, alone))
            for base in (True, False):
                for method in INFERENCES:
                    name = f"{'linearized NN' if base else 'finite NTK'}, {method}"
                    run = lambda m=method, b=base, f=few, t=test, n=network, s=seed: inferred(  # noqa: E731
                        n(), f, t, m, b, given, s
                    )
                    cells.append(study.cell({"method": name, **shared}, run))
    study.publish(table(cells), cells)
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: every method on each domain."""
    rows = []
    for domain in DOMAINS:
        for name in dict.fromkeys(c["method"] for c in cells if c["domain"] == domain):
            own = [c for c in cells if c["domain"] == domain and c["method"] == name]
            rows.append([
                f"{domain}: {name}", with_error([c["accuracy"] for c in own], 1, 100),
                with_error([c["nll"] for c in own], 3), with_error([c["ece"] for c in own], 3),
            ])  # fmt: skip
    return markdown(["", "accuracy %", "NLL", "ECE"], rows)


if __name__ == "__main__":
    main()
