"""Flipped digits by self-attribution: the attributors of dattri beside leave-one-out in closed form.

The noisy-label task of the examples of dattri 0.3.0 (``pip install dattri``; only computing needs it): 1,000
digits, a tenth of the labels moved to another class, a network trained on them, and for each sample its
attribution to itself. A score is judged by its area under the ROC curve. Each draw has its own images, flips
and initialization; all scores of a draw are of the same network.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.labels.encoders import TRUSTED, values
from experiments.labels.flipped import area, flipped
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

COUNT, TESTED, SHARE, CLASSES = 1000, 1000, 0.1, 10
EPOCHS, BATCH, RATE, FOLDS = 20, 64, 0.01, 5
MOMENTUM = {"logistic regression": 0.0, "perceptron": 0.9}
NETWORKS = tuple(MOMENTUM)
SEEN = ((0.1307,), (0.3081,))  # mean and standard deviation of the pixels of digits
GIVEN, TRIED = 0.01, (0.001, 0.01, 0.1, 1.0)  # regularization of the examples, and those tried in hindsight
PROJECTED, DIRECTIONS = 512, 512
INFLUENCE = "influence, explicit"
HINDSIGHT = "best of four in hindsight"

Scores = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Draw:
    """Samples, which labels are wrong, and a network before and after training."""

    x: Tensor
    labels: Tensor
    wrong: Tensor
    test: tuple[Tensor, Tensor]
    start: nn.Module
    net: nn.Module


def made(network: str) -> nn.Sequential:
    """A new network."""
    if network == NETWORKS[0]:
        return nn.Sequential(nn.Linear(784, CLASSES))
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def trained(net: nn.Module, momentum: float, x: Tensor, labels: Tensor) -> nn.Module:
    """A copy after all epochs, its batches in the order of the samples."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum)
    for _ in range(EPOCHS):
        for images_, classes in zip(x.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(images_), classes).backward()
            optimizer.step()
    return net.eval()


@lru_cache(maxsize=1)
def drawn(network: str, seed: int, data_dir: str | None) -> Draw:
    """One draw."""
    data = images("mnist", data_dir)
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seed))[:COUNT]
    x = pixels(data.train_x[order.numpy()], SEEN).flatten(1)
    labels, wrong = flipped(data.train_y[order], SHARE, CLASSES, seed)
    test = pixels(data.test_x[:TESTED], SEEN).flatten(1), data.test_y[:TESTED]
    torch.manual_seed(seed)
    start = made(network).eval()
    return Draw(x, labels, wrong, test, start, trained(start, MOMENTUM[network], x, labels))


# -- dattri ----------------------------------------------------------------------------------------


def attributed(draw: Draw, name: str, at_once: int = COUNT, **options: Any) -> Tensor:
    """Influence of each sample on its own loss by an attributor of dattri, (N,)."""
    functions: Any = importlib.import_module("dattri.algorithm.influence_function")
    task: Any = importlib.import_module("dattri.task").AttributionTask

    def loss(parameters: Any, pair: Any) -> Tensor:
        outputs = torch.func.functional_call(draw.net, parameters, (pair[0],))
        return F.cross_entropy(outputs, pair[1].long())  # one of them hands labels over as floats

    described = task(loss_func=loss, model=draw.net, checkpoints=draw.net.state_dict())
    attributor = getattr(functions, name)(task=described, device="cpu", **options)
    attributor.cache(loader(draw, COUNT))
    with torch.no_grad():
        if at_once == COUNT:
            found: Tensor = attributor.self_attribute(loader(draw, COUNT))
        else:
            found = attributor.attribute(loader(draw, COUNT), loader(draw, at_once)).diag()
    return found


def loader(draw: Draw, size: int) -> Any:
    """The samples in batches."""
    data = torch.utils.data.TensorDataset(draw.x, draw.labels)
    return torch.utils.data.DataLoader(data, batch_size=size)


def log_likelihood(net: nn.Module, parameters: Any, pair: Any) -> Tensor:
    """Log p of the label of one sample."""
    outputs = torch.func.functional_call(net, parameters, (pair[0][None],))
    return -F.cross_entropy(outputs, pair[1][None])


def tracin(draw: Draw) -> Tensor:
    """Squared gradients at the last checkpoint, along random directions, (N,)."""
    method: Any = importlib.import_module("dattri.algorithm.tracin").TracInAttributor
    task: Any = importlib.import_module("dattri.task").AttributionTask
    described = task(
        loss_func=lambda parameters, pair: -log_likelihood(draw.net, parameters, pair),
        model=draw.net,
        checkpoints=draw.net.state_dict(),
    )
    attributor = method(
        task=described,
        weight_list=torch.tensor([RATE]),
        normalized_grad=False,
        projector_kwargs={"proj_dim": PROJECTED, "device": "cpu"},
        device="cpu",
    )
    with torch.no_grad():
        found: Tensor = attributor.self_attribute(loader(draw, COUNT))
    return found


def trak(draw: Draw) -> Tensor:
    """The score of TRAK of each sample for itself, (N,)."""
    method: Any = importlib.import_module("dattri.algorithm.trak").TRAKAttributor
    task: Any = importlib.import_module("dattri.task").AttributionTask

    def margin(parameters: Any, pair: Any) -> Tensor:
        known = log_likelihood(draw.net, parameters, pair)
        return known - torch.log1p(-known.exp())

    attributor = method(
        task=task(loss_func=margin, model=draw.net, checkpoints=draw.net.state_dict()),
        correct_probability_func=lambda parameters, pair: log_likelihood(draw.net, parameters, pair).exp(),
        projector_kwargs={"proj_dim": PROJECTED, "device": "cpu"},
        device="cpu",
    )
    attributor.cache(loader(draw, COUNT))
    with torch.no_grad():
        found: Tensor = attributor.attribute(loader(draw, COUNT)).diag()
    return found


def of_dattri(network: str) -> dict[str, Callable[[Draw], Tensor]]:
    """The attributors that run on a network, with what the examples give them."""
    # the Hessian of all weights of the perceptron does not fit in memory
    simple = network == NETWORKS[0]
    layer = {} if simple else {"layer_name": ["6.weight", "6.bias"]}
    ways: dict[str, Callable[[Draw], Tensor]] = {"TracIn": tracin, "TRAK": trak}
    ways["influence, Arnoldi"] = partial(
        attributed, name="IFAttributorArnoldi", regularization=GIVEN, max_iter=10
    )
    ways["influence, EKFAC"] = partial(attributed, name="IFAttributorEKFAC", damping=GIVEN)
    for rho in TRIED:
        ways[f"{INFLUENCE}, {rho:g}"] = partial(
            attributed, name="IFAttributorExplicit", regularization=rho, **layer
        )
    if simple:
        ways["influence, conjugate gradients"] = partial(
            attributed, name="IFAttributorCG", at_once=100, regularization=GIVEN
        )
        ways["influence, LiSSA"] = partial(
            attributed, name="IFAttributorLiSSA", at_once=100, recursion_depth=100
        )
        ways["influence, DataInf"] = partial(
            attributed, name="IFAttributorDataInf", at_once=50, regularization=GIVEN
        )
    return ways


# -- the rest --------------------------------------------------------------------------------------


def folds(draw: Draw, network: str, seed: int) -> Tensor:
    """One minus the probability of each label by networks trained on the other folds, (N,)."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))
    found = torch.empty(COUNT)
    for part in order.chunk(FOLDS):
        rest = torch.ones(COUNT, dtype=torch.bool)
        rest[part] = False
        net = trained(draw.start, MOMENTUM[network], draw.x[rest], draw.labels[rest])
        with torch.no_grad():
            p = net(draw.x[part]).softmax(1)
        found[part] = 1 - p.gather(1, draw.labels[part, None])[:, 0]
    return found


def plain(draw: Draw, network: str, seed: int) -> Scores:
    """What needs no attribution."""

    @torch.no_grad()
    def losses() -> Tensor:
        return F.cross_entropy(draw.net(draw.x), draw.labels, reduction="none")

    return {"loss": losses, "self-confidence, five folds": lambda: folds(draw, network, seed)}


def of_fit(draw: Draw, way: str) -> Scores:
    """Scores of a closed-form fit; the first includes the seconds of the fit."""
    kind, which = way.split(", ")
    net = draw.net if which == "trained" else draw.start
    fits: list[Any] = []

    def margin() -> Tensor:
        data = draw.x, draw.labels
        if kind == "adapt":
            fits.append(linnet.adapt(copy.deepcopy(net), data))
        else:
            fits.append(linnet.fit(linnet.linearize(net), data, ridge="loo", solver="shared"))
        return linnet.audit.mislabeled(fits[0]).scores

    trusted = draw.test[0][:TRUSTED], draw.test[1][:TRUSTED]
    return {
        f"{way}: leave-one-out": margin,
        f"{way}: self-influence": lambda: linnet.audit.mislabeled(fits[0], score="self-influence").scores,
        f"{way}: value": lambda: -values(fits[0], trusted),
    }


def stored(draw: Draw, metric: str) -> Scores:
    """Self-influence of the trained network along leading directions of EKFAC."""
    likelihood = linnet.likelihoods.Categorical()

    def score() -> Tensor:
        curvature = linnet.curvature(draw.net, (draw.x, draw.labels), likelihood, structure="ekfac")
        with tempfile.TemporaryDirectory() as folder:
            sketched = linnet.with_sketch(draw.net, curvature, dim=DIRECTIONS)
            store = linnet.audit.GradientStore(Path(folder) / "store", sketched, likelihood)
            store.add([(draw.x, draw.labels)])
            return store.self_influence(metric=metric)

    return {f"store, {metric}, trained: self-influence": score}


RIGHT = {
    "accuracy": f"accuracy on {TESTED:,} other digits, %",
    "fitted": "flipped labels that it predicts, %",
}
STORES = {"store": "gradients", "store, by curvature": "curvature"}
FITS = ("fit, trained", "fit, untrained", "adapt, trained", "adapt, untrained")


def compared(network: str, seed: int, way: str, data_dir: str | None) -> dict[str, Any]:
    """Areas of a way's scores on one draw, and seconds of the processor."""
    draw = drawn(network, seed, data_dir)
    torch.manual_seed(seed)
    result: dict[str, Any] = {"areas": {}, "seconds of": {}}
    if way == "plain":
        scores = plain(draw, network, seed)
        with torch.no_grad():
            of = draw.test, (draw.x[draw.wrong], draw.labels[draw.wrong])
            right = [float((draw.net(x).argmax(1) == y).double().mean()) for x, y in of]
        result |= dict(zip(RIGHT, right, strict=True))
    elif way in FITS:
        scores = of_fit(draw, way)
    elif way in STORES:
        scores = stored(draw, STORES[way])
    else:
        scores = {way: partial(of_dattri(network)[way], draw)}
    for name, score in scores.items():
        begin = time.process_time()
        found = score().detach().double()
        result["seconds of"][name] = time.process_time() - begin
        result["areas"][name] = area(found, draw.wrong) if bool(found.isfinite().all()) else None
    return result


# -- tables ----------------------------------------------------------------------------------------


def gathered(cells: list[Cell], network: str, key: str) -> dict[str, list[float]]:
    """A number of every score, by draw; scores that were not finite in some draw are left out."""
    found: dict[str, dict[int, float | None]] = {}
    for cell in cells:
        if cell["network"] == network:
            for name, value in cell[key].items():
                found.setdefault(name, {})[cell["seed"]] = value
    every = {name: [by_seed[seed] for seed in sorted(by_seed)] for name, by_seed in found.items()}
    return {name: [one for one in of if one is not None] for name, of in every.items() if None not in of}


def best_of_dattri(areas: dict[str, list[float]], network: str) -> str:
    """The attributor of the highest mean, whatever its regularization."""
    return max(areas.keys() & of_dattri(network).keys(), key=lambda name: mean_and_error(areas[name])[0])


def named(name: str, network: str, areas: dict[str, list[float]]) -> str | None:
    """A score's name in the table; of the values tried in hindsight only the best has one."""
    tried = [f"{INFLUENCE}, {rho:g}" for rho in TRIED]
    if name in tried:
        best = max(tried, key=lambda one: mean_and_error(areas[one])[0])
        if name not in (f"{INFLUENCE}, {GIVEN:g}", best):
            return None
        part = "" if network == NETWORKS[0] else " in the last layer"
        mark = f" ({HINDSIGHT})" if name == best else ""
        return f"dattri: {INFLUENCE}{part}, {name.split(', ')[-1]}{mark}"
    if name in of_dattri(network):
        return f"dattri: {name}"
    return f"linnet: {name}" if ":" in name else name


def table_of(cells: list[Cell], network: str) -> str:
    """Markdown: scores by their mean area, the highest first."""
    areas, seconds = (gathered(cells, network, key) for key in ("areas", "seconds of"))
    best = best_of_dattri(areas, network)
    rows = []
    for name in sorted(areas, key=lambda one: -mean_and_error(areas[one])[0]):
        label = named(name, network, areas)
        if label is None:
            continue
        ahead = [a - b for a, b in zip(areas[name], areas[best], strict=True)]
        rows.append([
            label, with_error(areas[name], 2, 100),
            "–" if name == best else with_error(ahead, 2, 100),
            f"{mean_and_error(seconds[name])[0]:.1f}",
        ])  # fmt: skip
    return markdown(["score", "area, %", "ahead of the best of dattri", "seconds"], rows)


def regression_table(cells: list[Cell]) -> str:
    """Markdown for logistic regression."""
    return table_of(cells, NETWORKS[0])


def perceptron_table(cells: list[Cell]) -> str:
    """Markdown for the perceptron."""
    return table_of(cells, NETWORKS[1])


def networks_table(cells: list[Cell]) -> str:
    """Markdown: what the trained networks do."""
    rows = [
        [name, *(with_error(chosen(cells, key, network=name, way="plain"), 1, 100) for key in RIGHT)]
        for name in NETWORKS
    ]
    return markdown(["network", *RIGHT.values()], rows)


def main() -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5).parse_args()
    study, cells = Study("labels/attributors", arguments), []
    for seed in study.seeds:
        for network in NETWORKS:
            for way in ("plain", *FITS, *STORES, *of_dattri(network)):
                cells.append(
                    study.cell(
                        {"network": network, "seed": seed, "way": way},
                        lambda n=network, s=seed, w=way: compared(n, s, w, arguments.data_dir),
                    )
                )
    tables = networks_table(cells), regression_table(cells), perceptron_table(cells)
    study.publish("\n\n".join(tables), cells)


if __name__ == "__main__":
    main()
