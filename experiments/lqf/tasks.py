"""The source-target pairs of these studies, and the training runs that several of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from experiments.locate import find_data_dir
from experiments.sources import Images, images, pixels, pretrained, shots
from linnet.finetuning.finetuned import Finetuned
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.predictive.noise import fit_temperature, probabilities

METHODS = ("lqf", "lqf-fc", "gaf", "fc", "nlft")
# Learning rates that each method is tried with, chosen on a fifth of the training images held out.
RATES: dict[str, tuple[float, ...]] = {
    "lqf": (0.01, 0.03, 0.1, 0.3),
    "lqf-fc": (0.01, 0.03, 0.1, 0.3),
    "gaf": (0.001, 0.003, 0.01, 0.03),
    "fc": (0.003, 0.01, 0.03, 0.1),
    "nlft": (0.003, 0.01, 0.03, 0.1),
}
TESTED = 200  # test images, a fixed draw


@dataclass(frozen=True)
class Pair:
    """A pretrained network and a new task.

    Args:
        network: Its name in ``experiments.sources``.
        target: The data set.
        side: Height and width of the images.
        shots: Training images a class.
        coarse: Whether the 20 superclasses of CIFAR-100 are the classes.
    """

    network: str
    target: str
    side: int
    shots: int
    coarse: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        target = self.target.split("_")[0] + ("-coarse" if self.coarse else "")
        return f"{self.network} → {target} {self.side}"


Data = tuple[Tensor, Tensor]


def place_in_class(y: Tensor) -> Tensor:
    """The how many-th of its class each sample is, from 0."""
    known = nn.functional.one_hot(y)
    return (known.cumsum(0) * known).sum(1) - 1


def first_classes(data: Data, classes: int = 5) -> Data:
    """The samples of the first classes."""
    x, y = data
    return x[y < classes], y[y < classes]


PAIRS = (
    Pair("resnet20", "eurosat_1000_500", 32, 5),
    Pair("resnet20", "flowers_64", 32, 10),
    Pair("resnet20", "fashion_mnist", 32, 5),
    Pair("resnet20", "notmnist_test10k", 32, 5),
    Pair("resnet20", "cifar100_5k_2k", 32, 2, coarse=True),
    Pair("mobilenet", "flowers_64", 64, 10),
)
FULL_PAIRS = (
    Pair("resnet56", "eurosat_1000_500", 64, 100),
    Pair("resnet56", "flowers_64", 64, 100),
    Pair("resnet56", "fashion_mnist", 32, 100),
    Pair("resnet56", "notmnist_test10k", 32, 100),
    Pair("densenet", "eurosat_1000_500", 64, 100),
    Pair("densenet", "flowers_64", 64, 100),
    Pair("mobilenet", "flowers_160", 160, 15),
    Pair("mobilenet", "eurosat_1000_500", 64, 100),
)


@lru_cache(maxsize=2)
def _stored(name: str, data_dir: str | None) -> Images:
    """A data set, read once."""
    return images(name, data_dir)


def labels_of(pair: Pair, y: Tensor, data_dir: str | None) -> Tensor:
    """The labels of the task."""
    if not pair.coarse:
        return y
    with np.load(find_data_dir(data_dir) / f"{pair.target}.npz", allow_pickle=False) as file:
        return torch.from_numpy(file["coarse_of_fine"].astype(np.int64))[y]


def load(
    pair: Pair, seed: int, data_dir: str | None = None, per_class: int | None = None, tested: int = TESTED
) -> tuple[nn.Module, Data, Data]:
    """The network, a draw of training images, and the test images.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        data_dir: Folder of the data.
        per_class: Training images a class, if not those of the pair.
        tested: Number of test images, about equally many of each class, always the same.

    Returns:
        The pretrained network with its own head, (x, y) to train and (x, y) to test.
    """
    model, normalization = pretrained(pair.network, data_dir)
    stored = _stored(pair.target, data_dir)
    train_y = labels_of(pair, stored.train_y, data_dir)
    test_y = labels_of(pair, stored.test_y, data_dir)
    index = shots(train_y, per_class or pair.shots, seed)
    test = shots(test_y, max(1, tested // int(test_y.max() + 1)), 0)
    x = pixels(stored.train_x[index.numpy()], normalization, pair.side, 3)
    xt = pixels(stored.test_x[test.numpy()], normalization, pair.side, 3)
    return model, (x, train_y[index]), (xt, test_y[test])


def accuracy(outputs: Tensor, y: Tensor) -> float:
    """Share of right classes."""
    return float((outputs.argmax(1) == y).double().mean())


def log_loss(probs: Any, y: Tensor) -> float:
    """Mean of −log p of the right classes."""
    p = torch.as_tensor(probs).double().gather(1, y[:, None])
    return -float(p.clamp_min(1e-300).log().mean())


def loo_log_loss(fit: Any) -> float:
    """Log loss of the leave-one-out outputs; those of the squared loss at their best temperature."""
    outputs, labels = fit.loo().double(), fit.labels
    temperature = 1.0 if isinstance(fit, SoftmaxFit) else fit_temperature(outputs, labels)
    return log_loss(probabilities(outputs, None, temperature), labels)


def options(method: str, steps: int, batch: int = 16) -> dict[str, Any]:
    """Settings of a run; plain fine-tuning is clipped and annealed, the strongest form that we know of it."""
    shared: dict[str, Any] = {"steps": steps, "batch_size": batch}
    return {**shared, "clip": 1.0, "schedule": "cosine"} if method == "nlft" else shared


def finetune(
    model: nn.Module,
    train: Data,
    method: str,
    validation: Data | None = None,
    *,
    search: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Finetuned:
    """``linnet.finetune`` with the settings of its recipe, training and run by name, as grids list them.

    Args:
        model: The pretrained network.
        train: Training data.
        method: The recipe's name.
        validation: Data to score on.
        search: Values to try.
        seed: Seed of the run.
        settings: Settings by name.

    Returns:
        The result.
    """
    kinds = (linnet.Recipe, linnet.Training, linnet.Run)
    known = [{field.name for field in fields(kind)} for kind in kinds]
    recipe, training, run = ({k: v for k, v in settings.items() if k in names} for names in known)
    assert settings.keys() == {*recipe, *training, *run}
    return linnet.finetune(
        model,
        train,
        linnet.Recipe(method, **recipe),
        validation=validation,
        search=search,
        training=linnet.Training(**training),
        seed=seed,
        run=linnet.Run(**run),
    )


def tuned(
    pair: Pair,
    method: str,
    seed: int,
    rate: float | None,
    settings: Mapping[str, Any],
    *,
    data_dir: str | None = None,
    per_class: int | None = None,
    rates: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One run, with its learning rate given or chosen on a fifth of the training images.

    Args:
        pair: The pair.
        method: One of ``METHODS``.
        seed: Seed of the draw and of the run.
        rate: Learning rate; ``None`` to choose it.
        settings: Keyword arguments of :func:`finetune`.
        data_dir: Folder of the data.
        per_class: Training images a class, if not those of the pair.
        rates: Learning rates to try, if not those of ``RATES``.

    Returns:
        Test accuracy, the rate, the held-out accuracies by rate.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir, per_class)
    choice: dict[str, Any] = {"learning_rate": rate}
    if rate is None:
        choice = {"search": {"learning_rate": list(rates or RATES[method])}}
    run = finetune(model, train, method, seed=seed, **settings, **choice)
    held = {f"{c['learning_rate']:g}": c["scores"].get("accuracy") for c in run.candidates if c.get("scores")}
    losses = {f"{c['learning_rate']:g}": c["scores"].get("loss") for c in run.candidates if c.get("scores")}
    return {
        "accuracy": accuracy(run.predict(xt), yt),
        "rate": run.settings.values["learning_rate"],
        "held_out": held,
        "held_out_loss": losses,
    }


def optimum(
    pair: Pair,
    seed: int,
    loss: str = "squared",
    *,
    leaky: bool = True,
    data_dir: str | None = None,
    per_class: int | None = None,
) -> dict[str, Any]:
    """The linear model's optimum in closed form, its ridge by leave-one-out.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        loss: ``"squared"`` or ``"cross-entropy"``.
        leaky: Whether ReLU becomes Leaky ReLU.
        data_dir: Folder of the data.
        per_class: Training images a class, if not those of the pair.

    Returns:
        Test accuracy and the ridge.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir, per_class)
    scale = 15.0 if loss == "squared" else 5.0
    lin = linear_model(model, train, leaky=leaky, scale=scale)
    solved = linnet.fit(lin, train, loss, ridge="loo")
    return {"accuracy": accuracy(solved.predict(xt), yt), "ridge": solved.ridge}


def linear_model(
    model: nn.Module,
    train: Data,
    *,
    leaky: bool = True,
    scale: float = 15.0,
    classes: int | None = None,
    head: str = "probe",
    seed: int = 0,
) -> linnet.Linearized:
    """The network with a new head, linearized in all parameters.

    Args:
        model: The pretrained network.
        train: Training data, for a probe.
        leaky: Whether ReLU becomes Leaky ReLU.
        scale: α of a probe's targets.
        classes: Number of classes, if not all have an example.
        head: ``"probe"`` or ``"random"``; a random one has seen no label, so leave-one-out is honest.
        seed: Seed of a random head.

    Returns:
        The linear model.
    """
    network = linnet.surgery.leaky_relu(model, 0.2) if leaky else model
    classes = classes or int(train[1].max()) + 1
    generator = torch.Generator().manual_seed(seed)
    data = train if head == "probe" else None
    init = linnet.Probe(scale=scale) if head == "probe" else head
    made = linnet.with_head(network, classes, init, data, seed=generator)
    return linnet.linearize(made, "all")
