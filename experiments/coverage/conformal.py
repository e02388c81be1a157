"""How many new answers ``fit.interval`` and ``fit.sets`` hold: nominal 90 %, samples drawn at random.

Values: samples of UCI sets behind a random network. Beside the jackknife+ are the Gaussian interval of
``predictive(x).with_noise()`` and split conformal prediction, which fits half of the samples and takes the
errors on the others. Classes: samples of image and text sets behind trained networks, with the accuracy, the
size of the sets, and how often the right class is held in the class where that is least often. Widths are
relative to split conformal's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.adapt.tasks import DEVELOPMENT, NETWORKS, REPORTED, drawn
from experiments.coverage.intervals import NORMAL, UCI, measured
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error
from linnet.predictive.conformal import rank
from linnet.tangent.batch import take

COUNTS = (20, 50, 200)
COVERAGE = 0.9
WAYS = ("adapt", "loo")
TASKS = (
    ("resnet20", "hand signs"),
    ("resnet20", "EuroSAT"),
    ("resnet20", "Fashion-MNIST"),
    ("resnet20", "Kannada digits"),
    ("minilm6", "news"),
    ("minilm6", "question types"),
    ("minilm6", "subjectivity"),
    ("minilm6", "emotions"),
)
POOL, TESTS = 3000, 1000


def fitted(way: str, net: nn.Module, data: tuple[Any, Tensor]) -> Any:
    """A fit, its ridge by leave-one-out."""
    return linnet.adapt(net, data) if way == "adapt" else linnet.fit(linnet.linearize(net), data, ridge=way)


def values(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, float]:
    """Coverage and mean width of three intervals for the same new targets."""
    x, y = data[0], data[1][:, None]
    torch.manual_seed(seed)
    layers = (nn.Linear(x.shape[1], 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    net = nn.Sequential(*layers).double()
    fit = fitted(way, net, (x[:n], y[:n]))
    prediction = fit.predictive(x[n:]).with_noise()
    half = NORMAL * prediction.variance.sqrt()
    part, rest = fitted(way, net, (x[: n // 2], y[: n // 2])), slice(n // 2, n)
    errors = (part.predict(x[rest]) - y[rest]).abs().flatten()
    centre, split = part.predict(x[n:]), float(errors.kthvalue(rank(len(errors), COVERAGE)).values)
    ends = {
        "jackknife+": fit.interval(x[n:], COVERAGE).unbind(2),
        "Gaussian": (prediction.mean - half, prediction.mean + half),
        "split": (centre - split, centre + split),
    }
    found = {}
    for name, (low, high) in ends.items():
        found[f"{name} covered"] = float(((low <= y[n:]) & (y[n:] <= high)).double().mean())
        found[f"{name} width"] = float((high - low).mean()) / (2 * split)
    return found


@lru_cache(maxsize=1)
def task(network: str, name: str, data_dir: str | None) -> tuple[Any, ...]:
    """A trained network, its pool of samples and test samples."""
    given = NETWORKS[network]
    model, prepared = given.load(data_dir)
    what = next(one for one in (*DEVELOPMENT, *REPORTED) if one.name == name)
    return model, drawn(what, given, prepared, POOL, TESTS, data_dir)


def classes(network: str, name: str, n: int, seed: int, data_dir: str | None) -> dict[str, float]:
    """Coverage and size of sets of classes."""
    model, (x, y, xt, yt) = task(network, name, data_dir)
    at = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:n]
    fit = linnet.adapt(model, (take(x, at), y[at]))
    found = {"accuracy": float((fit.predict(xt).argmax(1) == yt).double().mean())}
    for key, by_class in (("", False), (" by class", True)):
        sets = fit.sets(xt, COVERAGE, by_class=by_class)
        sets = torch.cat([sets, sets.new_zeros(len(sets), int(yt.max()) + 1 - sets.shape[1])], 1)
        right = sets.gather(1, yt[:, None])[:, 0].double()
        each = [float(right[yt == label].mean()) for label in yt.unique()]
        found |= {f"covered{key}": float(right.mean()), f"size{key}": float(sets.sum(1).double().mean())}
        found[f"least{key}"] = min(each)
    return found


def tables(cells: list[Cell]) -> str:
    """Markdown: intervals of values, then sets of classes."""
    names = ("jackknife+", "Gaussian", "split")
    header = ["values", "N", *(f"{name} covers %" for name in names), "jackknife+ width", "Gaussian width"]
    rows = []
    for way in WAYS:
        for n in COUNTS:
            own = [with_error(chosen(cells, f"{name} covered", way=way, n=n), 1, 100) for name in names]
            wide = [with_error(chosen(cells, f"{name} width", way=way, n=n), 2) for name in names[:2]]
            rows.append([f"UCI, {way}", str(n), *own, *wide])
    first = markdown(header, rows)
    keys = ("covered", "size", "least", "covered by class", "size by class", "least by class")
    header = ["network", "task", "N", "right %", "held %", "classes in a set", "in the least class %"]
    header += ["by class: held %", "classes in a set", "in the least class %"]
    rows = []
    for network, name in TASKS:
        for n in COUNTS:
            where = {"network": NETWORKS[network].name, "task": name, "n": n}
            if not chosen(cells, "accuracy", **where):
                continue
            row = [
                *map(str, where.values()),
                f"{100 * mean_and_error(chosen(cells, 'accuracy', **where))[0]:.1f}",
            ]
            for key in keys:
                scale = 1 if key.startswith("size") else 100
                row.append(with_error(chosen(cells, key, **where), 2 if scale == 1 else 1, scale))
            rows.append(row)
    return f"{first}\n\n{markdown(header, rows)}"


def main() -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=20)
    options.add_argument(
        "--only", choices=("values", "classes"), help="one of the two halves (default: both)"
    )
    given = options.parse_args()
    study, cells = Study("coverage/conformal", given), []
    for name in UCI if given.only != "classes" else ():
        for n in COUNTS:
            for seed in study.seeds:
                for way in WAYS:

                    def numbers(name: str = name, n: int = n, seed: int = seed, way: str = way) -> Any:
                        return values(way, measured(name, n, seed, given.data_dir), n, seed)

                    cells.append(study.cell({"task": name, "n": n, "seed": seed, "way": way}, numbers))
    for network, name in TASKS if given.only != "values" else ():
        for n in COUNTS:
            for seed in study.seeds:

                def counted(network: str = network, name: str = name, n: int = n, seed: int = seed) -> Any:
                    return classes(network, name, n, seed, given.data_dir)

                what = {"network": NETWORKS[network].name, "task": name, "n": n, "seed": seed}
                cells.append(study.cell(what, counted))
    study.publish(tables(cells), cells)


if __name__ == "__main__":
    main()
