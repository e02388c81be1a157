"""The networks and data that the studies on MNIST share: trained once, kept beside the results.

Two layers of 1024 units with ReLU and dropout of 0.5, on binarized MNIST: every pixel is drawn anew, from its
gray value, each time an image is seen (Botev 2020, section 5.2.2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import linnet
from experiments.baselines.dropout import mc_dropout
from experiments.baselines.factorized import factorized_gaussian
from experiments.sources import images, pixels
from linnet.curvatures import MonteCarlo
from linnet.likelihoods import Categorical

METHODS = ("deterministic", "MC dropout", "FFG", "diagonal Laplace", "Kronecker Laplace")
PLAIN = "deterministic, no dropout in training"  # a method only where the posteriors are of that network
VALIDATION = 5000
PRECISION = 1e-2  # λ of training, as in the thesis
# N is this times the number of images, and λ: the grid of the thesis' search is not given
SCALES = (1.0, 10.0, 100.0)
PRIORS = (1e-2, 1.0, 1e1, 1e2, 1e3, 1e4)
# batch size, and whether the rate is annealed to zero; Adam at 10⁻³, or SGD at 10⁻² with momentum of 0.9
RECIPES = {"adam": (200, True), "sgd": (100, False)}
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Digits:
    """Gray values in [0, 1], flat (N, 784), and labels; the last 5,000 training images are for validation."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    letters: Tensor


def binarized(x: Tensor, seed: int) -> Tensor:
    """Each pixel 1 with the probability of its gray value."""
    return torch.bernoulli(x, generator=torch.Generator(x.device).manual_seed(seed))


def digits(arguments: argparse.Namespace) -> Digits:
    """MNIST and notMNIST, as many as asked for, on the device."""
    sets = images("mnist", arguments.data_dir)
    letters = images("notmnist_test10k", arguments.data_dir)
    device = arguments.device
    gray, test = (pixels(x).flatten(1).to(device) for x in (sets.train_x, sets.test_x))
    y, test_y = sets.train_y.to(device), sets.test_y.to(device)
    kept = min(arguments.train, len(gray) - VALIDATION)
    both = torch.cat([pixels(x) for x in (letters.train_x, letters.test_x)]).flatten(1)
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(0))
    return Digits(
        (gray[:kept], y[:kept]),
        (gray[-VALIDATION:][: arguments.validation], y[-VALIDATION:][: arguments.validation]),
        (test[: arguments.test], test_y[: arguments.test]),
        both[order[: arguments.letters]].to(device),
    )


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The sizes that the studies share; ``--full`` takes the thesis' own."""
    add = parser.add_argument
    add("--width", type=int, default=1024)
    add("--train", type=int, default=20_000, help="training images")
    add("--validation", type=int, default=1000, help="validation images that N and λ are chosen by")
    add("--test", type=int, default=10_000, help="test images")
    add("--letters", type=int, default=4000, help="images of notMNIST")
    add("--epochs", type=int, default=10, help="of training with dropout")
    add("--ffg-epochs", type=int, default=5, help="of the factorized Gaussian, which begins at that network")
    add("--draws", type=int, default=1, help="binarizations of an image that curvature is summed over")
    add("--samples", type=int, default=50, help="networks that predictions average")
    add("--networks", type=Path, default=None, help="folder of the trained networks")
    add("--recipe", choices=list(RECIPES), default="adam", help="sgd: the thesis' constant rate of 0.01")
    add(
        "--posterior-of",
        choices=("dropout", "plain"),
        default="dropout",
        help="the network that FFG and the Laplace approximations are of; plain: trained without dropout",
    )
    add("--predict", choices=("mc", "glm"), default="mc", help="sampled weights, or linearized predictions")
    return parser


def resized(arguments: argparse.Namespace) -> argparse.Namespace:
    """The sizes of the thesis for ``--full``: 250 epochs, 100 samples, all images."""
    if arguments.full:
        arguments.train, arguments.validation, arguments.letters = 55_000, VALIDATION, 10_000
        arguments.epochs, arguments.ffg_epochs, arguments.samples = 250, 250, 100
        arguments.draws = 20  # the thesis has 1,000
        arguments.recipe = "sgd"
    return arguments


def sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the trained networks and posteriors depend on."""
    names = ("width", "train", "validation", "epochs", "ffg_epochs", "draws", "recipe", "posterior_of")
    return {name: getattr(arguments, name) for name in names}


def network(width: int, seed: int, rate: float = 0.5) -> nn.Sequential:
    """784-width-width-10 with dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Dropout(rate),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(rate), nn.Linear(width, 10),
    )  # fmt: skip


def trained(
    data: Digits, arguments: argparse.Namespace, seed: int, folder: Path, kind: str = "dropout"
) -> nn.Sequential:
    """The network trained with dropout, or a "plain" one without; read back where it is known."""
    model = network(arguments.width, seed, 0.5 if kind == "dropout" else 0.0).to(arguments.device)
    file = folder / f"{kind}-{_name(arguments)}-{seed}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True, map_location=arguments.device))
        return model.eval()
    (x, y), (size, annealed) = data.train, RECIPES[arguments.recipe]
    steps = arguments.epochs * -(-len(x) // size)
    optimizer: torch.optim.Optimizer
    if arguments.recipe == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    until = steps if annealed else 10**9
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, until)
    order = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(arguments.epochs):
        drawn = binarized(x, 1000 * seed + epoch)
        for index in torch.randperm(len(x), generator=order).to(x.device).split(size):
            squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            loss = F.cross_entropy(model(drawn[index]), y[index]) + PRECISION / (2 * len(x)) * squares
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.save(model.state_dict(), file)
    return model.eval()


def _name(arguments: argparse.Namespace) -> str:
    """What the trained network depends on, in a file's name."""
    recipe = "" if arguments.recipe == "adam" else f"-{arguments.recipe}"
    return f"{arguments.width}-{arguments.train}-{arguments.epochs}{recipe}"


class Sampled:
    """Class probabilities of networks with given weights.

    Args:
        model: The network.
        weights: (S, P), in the order of its parameters.
    """

    def __init__(self, model: nn.Module, weights: Tensor) -> None:
        self.model = model
        names = [(name, p.shape) for name, p in model.named_parameters()]
        pieces = weights.split([shape.numel() for _, shape in names], 1)
        self.weights = [
            {name: piece[s].view(shape) for (name, shape), piece in zip(names, pieces, strict=True)}
            for s in range(len(weights))
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """(S, N, C), differentiable in x."""
        runs = [torch.func.functional_call(self.model, weights, (x,)) for weights in self.weights]
        return torch.stack(runs).softmax(-1)


def factorized(
    model: nn.Module, data: Digits, arguments: argparse.Namespace, seed: int, folder: Path
) -> Sampled:
    """The thesis' FFG, from the network that dropout has trained, so that few epochs are enough."""
    file = folder / f"ffg-{arguments.posterior_of}-{_name(arguments)}-{arguments.ffg_epochs}-{seed}.pt"
    if not file.exists():
        found = factorized_gaussian(
            model, (binarized(data.train[0], 7000 + seed), data.train[1]), Categorical(),
            linnet.SVI(training=linnet.Training(epochs=arguments.ffg_epochs, batch_size=500)),
            prior_precision=PRECISION, samples=2, seed=seed,
        )  # fmt: skip
        torch.save({"mean": found.mean, "deviation": found.deviation}, file)
    known = torch.load(file, weights_only=True, map_location=arguments.device)
    source = torch.Generator(known["mean"].device).manual_seed(seed)
    noise = torch.randn(arguments.samples, len(known["mean"]), generator=source, device=known["mean"].device)
    return Sampled(model, known["mean"] + known["deviation"] * noise)


def fitted(
    structure: str, model: nn.Module, data: Digits, arguments: argparse.Namespace, folder: Path, seed: int
) -> linnet.Laplace:
    """Laplace's method, N and λ chosen by the likelihood of the validation images; kept in a folder.

    The diagonal takes the Fisher identity, the Kronecker factors all columns of Λ (KFLR), as in the thesis.
    """
    of = f"{structure}-{arguments.posterior_of}-{_name(arguments)}"
    place = folder / f"{of}-{arguments.draws}-{arguments.validation}-{arguments.predict}-{seed}"
    if place.exists():
        return linnet.load(place, model)
    x, y = data.train
    drawn = torch.cat([binarized(x, 5000 + k) for k in range(arguments.draws)])
    expectation = "exact" if structure == "kfac" else MonteCarlo(seed=seed)
    damping = "matrix-normal" if structure == "kfac" else "exact"
    la = linnet.Laplace(
        model, Categorical(), structure, PRECISION, damping=damping, expectation=expectation,
        data_scale=1 / arguments.draws,
    )  # fmt: skip
    la.fit((drawn, y.repeat(arguments.draws)))
    held_out = TensorDataset(binarized(data.validation[0], 6000), data.validation[1])
    grid = linnet.Grid(
        prior_precision=PRIORS, data_scale=[scale / arguments.draws for scale in SCALES],
        predict=arguments.predict, samples=10, seed=seed,
    )  # fmt: skip
    la.tune("grid", DataLoader(held_out, len(held_out)), search=grid)
    la.save(place)
    return la


def predictors(
    data: Digits, arguments: argparse.Namespace, seed: int, folder: Path
) -> tuple[dict[str, Callable[[], Predict]], dict[str, Callable[[], dict[str, float]]]]:
    """For each of ``METHODS``, and ``PLAIN``, a function that makes its predictions; N and λ of Laplace's.

    Args:
        data: Digits and letters.
        arguments: Sizes.
        seed: Seed.
        folder: Where networks are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with_dropout = trained(data, arguments, seed, folder)
    same = arguments.posterior_of == "dropout"
    model = with_dropout if same else trained(data, arguments, seed, folder, "plain")
    known: dict[str, linnet.Laplace] = {}

    def posterior(structure: str) -> linnet.Laplace:
        if structure not in known:
            known[structure] = fitted(structure, model, data, arguments, folder, seed)
        return known[structure]

    def drawn(structure: str) -> Predict:
        if arguments.predict == "glm":
            return lambda x: posterior(structure).predictive(x).probs
        return Sampled(model, posterior(structure).sample(arguments.samples, seed))

    def chosen(structure: str) -> dict[str, float]:
        la = posterior(structure)
        # N of eq. 5.14 is s times the number of examples
        return {"prior": float(la.prior_precision), "n": la.data_scale * la.examples}  # type: ignore[arg-type]

    def dropout() -> Predict:
        found = mc_dropout(with_dropout, Categorical(), arguments.samples, seed)
        return lambda x: found.predictive(x).sampled_probs

    made: list[Callable[[], Predict]] = [
        # the thesis' deterministic pass is one "through the Dropout trained network"
        lambda: lambda x: with_dropout(x).softmax(-1),
        dropout,
        lambda: factorized(model, data, arguments, seed, folder),
        lambda: drawn("diagonal"),
        lambda: drawn("kfac"),
    ]
    facts = {METHODS[3]: lambda: chosen("diagonal"), METHODS[4]: lambda: chosen("kfac")}
    found = dict(zip(METHODS, made, strict=True))
    return found if same else found | {PLAIN: lambda: lambda x: model(x).softmax(-1)}, facts


def top(classes: int = 10) -> float:
    """The entropy of a uniform distribution."""
    return math.log(classes)
