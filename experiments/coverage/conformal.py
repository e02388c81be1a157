"""How many new answers ``fit.interval`` and ``fit.sets`` hold: nominal 90 %, samples drawn at random.

Simulated: how far errors are to be raised where the ridge is chosen by the same samples. Beside no and the
raised errors stand those with a ridge chosen anew without each sample, which leaves two out at every ridge.
Values: samples of UCI sets behind a random network. Beside the jackknife+ are the Gaussian interval of
``predictive(x).with_noise()`` and split conformal prediction, which fits half of the samples and takes the
errors on the others. Peers: full conformal prediction of the same ridge regression, MAPIE's intervals by five
folds and by a split, and crepes' by a split, around the same fits. Shift: new inputs that are likelier far
along the first direction of the training's, with and without ``shift=``. Classes: samples of image and text
sets behind trained networks, with the accuracy, the size of the sets, and how often the right class is held
in the class where that is least often; with the likeliest class always in, by class, and such as may be
empty. Widths are relative to split conformal's, of simulated tasks to what the root mean squared error asks
for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import linnet
from experiments.adapt.tasks import DEVELOPMENT, NETWORKS, REPORTED, drawn
from experiments.coverage.intervals import (
    NOISES,
    NORMAL,
    TEACHERS,
    UCI,
    fitted,
    measured,
    network,
    simulated,
)
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error
from linnet.predictive.conformal import jackknife, rank
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
SHIFT_COUNTS, TILT, TESTED = (50, 200), 1.0, 300  # of new inputs exp(x) times as likely at x deviations


def chosen_anew(fit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs without each sample, (N, T, 1), and its error, (N, 1), at the ridge that the others choose."""
    r, n = fit.system.residual[:, 0], fit.n
    values, vectors = torch.linalg.eigh(fit.system.kernel)
    criteria, found = [], []
    for ridge in fit.ridge * torch.logspace(-2, 2, 25, dtype=torch.float64):
        inverse = (vectors / (values.clamp_min(0) + ridge)) @ vectors.T
        beta, own = inverse @ r, inverse.diagonal()
        # row i, column j: the error of j where both are left out
        pairs = own[:, None] * beta - inverse * beta[:, None]
        pairs = pairs / (own[:, None] * own - inverse.square()).clamp_min(1e-300)
        criteria.append(pairs.fill_diagonal_(0).square().sum(1))
        found.append((inverse, beta, beta / own))
    best = torch.stack(criteria).argmin(0)
    cross = torch.cat(list(fit.system.kernel_to_train(x))).double().view(-1, n)
    left = cross.new_zeros(n, len(cross), 1)
    for place in best.unique().tolist():
        (inverse, beta, error), at = found[place], (best == place).nonzero()[:, 0]
        outputs = fit._start(x) + (cross @ beta)[:, None]
        left[at] = (outputs - cross @ inverse[:, at] * error[at]).T[:, :, None]
    errors = torch.stack([error for _, _, error in found])[best, torch.arange(n)]
    return left, errors.abs()[:, None]


def raised(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, float]:
    """Coverage and mean width of intervals by errors as they are, raised, and with the ridge chosen anew."""
    x, y = data[0], data[1][:, None]
    fit = fitted(way, network(x.shape[1], seed), (x[:n], y[:n]))
    asked = 2 * NORMAL * float((fit.predict(x[n:]) - y[n:]).square().mean().sqrt())
    unseen, left = fit._unseen(), torch.cat([part for _, part in fit._without_each(x[n:])], 1)
    plain = jackknife(left, (unseen.targets - unseen.outputs).abs(), COVERAGE)
    every = {"plain": plain, "raised": fit.interval(x[n:], COVERAGE)}
    every["anew"] = jackknife(*chosen_anew(fit, x[n:]), COVERAGE)
    return compared(every, y[n:], asked)


def compared(every: dict[str, Tensor], y: Tensor, asked: float) -> dict[str, float]:
    """Coverage of intervals (T, 1, 2) of each kind, and the mean width of bounded ones by another."""
    found = {}
    for name, ends in every.items():
        low, high = ends.unbind(2)
        found[f"{name} covered"] = float(((low <= y) & (y <= high)).double().mean())
        wide = high - low
        found[f"{name} width"] = float(wide[wide.isfinite()].mean()) / asked
    return found


def values(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, float]:
    """Coverage and mean width of three intervals for the same new targets."""
    x, y = data[0], data[1][:, None]
    net = network(x.shape[1], seed)
    fit = fitted(way, net, (x[:n], y[:n]))
    prediction = fit.predictive(x[n:]).with_noise()
    half = NORMAL * prediction.variance.sqrt()
    part, rest = fitted(way, net, (x[: n // 2], y[: n // 2])), slice(n // 2, n)
    errors = (part.predict(x[rest]) - y[rest]).abs().flatten()
    center, split = part.predict(x[n:]), float(errors.kthvalue(rank(len(errors), COVERAGE)).values)
    ends = {
        "jackknife+": fit.interval(x[n:], COVERAGE),
        "Gaussian": torch.stack([prediction.mean - half, prediction.mean + half], 2),
        "split": torch.stack([center - split, center + split], 2),
    }
    return compared(ends, y[n:], 2 * split)


def full(fit: Any, x: Tensor) -> Tensor:
    """Intervals of full conformal prediction for some examples, (T, 1, 2), in closed form."""
    # With (x, y) added the residuals are, but for one factor, βᵢ − aᵢu of the training examples and u of the
    # new one, u = (y − f) / s: y is held unless u is larger than too many of the others.
    # Source: Nouretdinov, Melluish and Vovk, ICML 2001, on ridge regression confidence machines.
    kernel, beta, n = fit.system.kernel.double(), fit.system.beta.double().flatten(), fit.n
    cross = torch.cat(list(fit.system.kernel_to_train(x))).double().view(-1, n)
    prediction, held_at_most = fit.predictive(x), rank(n, COVERAGE)
    a = torch.linalg.solve(kernel + fit.ridge * torch.eye(n, dtype=torch.float64), cross.T).T
    s = fit.ridge * (1 + prediction.variance.flatten().double() / fit.noise)
    ends = []
    for t in range(len(cross)):
        edges = torch.cat([beta / (a[t] - 1), beta / (a[t] + 1)])
        edges = edges[edges.isfinite()].sort().values
        # at an edge the examples tie; it is held where no more are below, in absolute value, than may be
        larger = (beta - a[t] * edges[:, None]).abs() >= edges[:, None].abs() * (1 - 1e-12)
        inside = edges[(~larger).sum(1) < held_at_most]
        ends.append(torch.stack([inside.min(), inside.max()]) * s[t])
    middle, factor = prediction.mean.double().flatten()[:, None], fit._unseen().factor
    return (middle + factor * torch.stack(ends))[:, None]


def around(way: str, seed: int) -> Any:
    """The same fit as an estimator of scikit-learn, for those that fit it to parts."""
    from sklearn.base import BaseEstimator, RegressorMixin

    class Fitted(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any) -> Any:
            x, t = torch.as_tensor(X), torch.as_tensor(y)[:, None]
            self.fit_ = fitted(way, network(x.shape[1], seed), (x, t))
            return self

        def predict(self, X: Any) -> Any:
            return self.fit_.predict(torch.as_tensor(X))[:, 0].numpy()

    return Fitted()


def beside_peers(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, float]:
    """Coverage, width relative to our split, and seconds, of intervals around the same fits."""
    import crepes
    from mapie.regression import CrossConformalRegressor, SplitConformalRegressor

    x, y = data[0].numpy(), data[1].numpy()
    own, rest, half = (x[:n], y[:n]), (x[n // 2 : n], y[n // 2 : n]), (x[: n // 2], y[: n // 2])
    new, truth = x[n:], data[1][n:, None]

    def ours() -> Any:
        return fitted(way, network(x.shape[1], seed), (data[0][:n], data[1][:n, None]))

    def crossed() -> Any:
        given = CrossConformalRegressor(around(way, seed), confidence_level=COVERAGE, method="plus", cv=5)
        return given.fit_conformalize(*own).predict_interval(new)[1][:, :, 0]

    def split() -> Any:
        given = SplitConformalRegressor(around(way, seed), confidence_level=COVERAGE, prefit=False)
        return given.fit(*half).conformalize(*rest).predict_interval(new)[1][:, :, 0]

    def wrapped() -> Any:
        given = crepes.WrapRegressor(around(way, seed))
        given.fit(*half)
        given.calibrate(*rest)
        return given.predict_int(new, confidence=COVERAGE)

    ways = {
        "jackknife+": lambda: ours().interval(data[0][n:], COVERAGE)[:, 0],
        "full": lambda: full(ours(), data[0][n:])[:, 0],
        "MAPIE, five folds": crossed,
        "MAPIE, split": split,
        "crepes, split": wrapped,
    }
    ends, seconds = {}, {}
    for name, made in ways.items():
        begin = time.perf_counter()
        ends[name] = torch.as_tensor(made())[:, None]
        seconds[f"{name} seconds"] = time.perf_counter() - begin
    wide = float((ends["MAPIE, split"][..., 1] - ends["MAPIE, split"][..., 0]).mean())
    return compared(ends, truth, wide) | seconds


def shifted(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, float]:
    """Coverage and width where new inputs are likelier far along the first direction of the training's."""
    # Source of the tilt: Tibshirani, Barber, Candès and Ramdas, NeurIPS 2019, section 2.3
    from sklearn.linear_model import LogisticRegression

    x, y = data[0], data[1][:, None]
    direction = torch.linalg.svd(x[:n] - x[:n].mean(0), full_matrices=False)[2][0]
    along = x @ direction
    ratio = (TILT * (along - along[:n].mean()) / along[:n].std()).exp()
    drawn = n + torch.multinomial(ratio[n:], TESTED, True, generator=torch.Generator().manual_seed(seed))
    new, truth = x[drawn], y[drawn]
    fit = fitted(way, network(x.shape[1], seed), (x[:n], y[:n]))
    both = torch.cat([x[:n], new]).numpy()
    told = LogisticRegression(max_iter=1000).fit(both, [0] * n + [1] * len(new)).predict_proba(both)
    odds = torch.as_tensor(told[:, 1] / told[:, 0])
    ends = {
        "as it is": fit.interval(new, COVERAGE),
        "ratio known": fit.interval(new, COVERAGE, shift=(ratio[:n], ratio[drawn])),
        "by a classifier": fit.interval(new, COVERAGE, shift=(odds[:n], odds[n:])),
    }
    bounded = {
        f"{name} bounded": float(each.isfinite().all(2).double().mean()) for name, each in ends.items()
    }
    numbers = float(ratio[:n].sum().square() / ratio[:n].square().sum())
    return compared(ends, truth, 1.0) | bounded | {"numbers": numbers}


@lru_cache(maxsize=1)
def task(key: str, name: str, data_dir: str | None) -> tuple[Any, ...]:
    """A trained network, its pool of samples and test samples."""
    given = NETWORKS[key]
    model, prepared = given.load(data_dir)
    what = next(one for one in (*DEVELOPMENT, *REPORTED) if one.name == name)
    return model, drawn(what, given, prepared, POOL, TESTS, data_dir)


SET_KINDS = {"": {}, " by class": {"by_class": True}, " empty": {"empty": True}}


def classes(key: str, name: str, n: int, seed: int, data_dir: str | None) -> dict[str, float]:
    """Coverage and size of sets of classes."""
    model, (x, y, xt, yt) = task(key, name, data_dir)
    at = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:n]
    fit = linnet.adapt(model, (take(x, at), y[at]))
    found = {"accuracy": float((fit.predict(xt).argmax(1) == yt).double().mean())}
    for end, kind in SET_KINDS.items():
        held = fit.sets(xt, COVERAGE, **kind)
        held = torch.cat([held, held.new_zeros(len(held), int(yt.max()) + 1 - held.shape[1])], 1)
        right = held.gather(1, yt[:, None])[:, 0].double()
        each = [float(right[yt == label].mean()) for label in yt.unique()]
        found |= {f"covered{end}": float(right.mean()), f"size{end}": float(held.sum(1).double().mean())}
        found[f"least{end}"] = min(each)
        found[f"none{end}"] = float((~held.any(1)).double().mean())
    return found


def simulations(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way to choose the ridge and number of samples, of simulated tasks."""
    names = ("plain", "raised", "anew")
    header = ["ridge by", "N", *(f"{name}: held %" for name in names), *(f"{name}: width" for name in names)]
    rows = []
    for way in WAYS:
        for n in COUNTS:
            where = {"part": "simulated", "way": way, "n": n}
            held = [with_error(chosen(cells, f"{name} covered", **where), 1, 100) for name in names]
            wide = [f"{mean_and_error(chosen(cells, f'{name} width', **where))[0]:.2f}" for name in names]
            rows.append([way, str(n), *held, *wide])
    return markdown(header, rows)


def intervals(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way to choose the ridge and number of samples, of UCI sets."""
    names = ("jackknife+", "Gaussian", "split")
    header = ["ridge by", "N", *(f"{name}: held %" for name in names), "jackknife+: width", "Gaussian: width"]
    rows = []
    for way in WAYS:
        for n in COUNTS:
            where = {"part": "values", "way": way, "n": n}
            own = [with_error(chosen(cells, f"{name} covered", **where), 1, 100) for name in names]
            wide = [with_error(chosen(cells, f"{name} width", **where), 2) for name in names[:2]]
            rows.append([way, str(n), *own, *wide])
    return markdown(header, rows)


SHIFTS = ("as it is", "ratio known", "by a classifier")


def shifts(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way to choose the ridge and number of samples, where inputs have shifted."""
    header = ["ridge by", "N", "N in effect", *(f"{name}: held %" for name in SHIFTS)]
    header += [f"{name}: bounded %" for name in SHIFTS[1:]]
    rows = []
    for way in WAYS:
        for n in SHIFT_COUNTS:
            where = {"part": "shift", "way": way, "n": n}
            if not (effect := chosen(cells, "numbers", **where)):
                continue
            held = [with_error(chosen(cells, f"{name} covered", **where), 1, 100) for name in SHIFTS]
            bounded = [chosen(cells, f"{name} bounded", **where) for name in SHIFTS[1:]]
            shares = [f"{100 * mean_and_error(one)[0]:.0f}" for one in bounded]
            rows.append([way, str(n), f"{mean_and_error(effect)[0]:.0f}", *held, *shares])
    return markdown(header, rows)


PEERS = ("jackknife+", "full", "MAPIE, five folds", "MAPIE, split", "crepes, split")
PEER_COUNTS = (20, 50, 100, 200)


def peers(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way to choose the ridge, number of samples and kind of interval."""
    header = ("ridge by", "N", "interval", "held %", "median width", "mean width", "seconds")
    rows = []
    for way in WAYS:
        for n in PEER_COUNTS:
            where = {"part": "peers", "way": way, "n": n}
            own = [cell for cell in cells if where.items() <= cell.items()]
            for name in PEERS if own else ():
                held = with_error(chosen(own, f"{name} covered"), 1, 100)
                width = chosen(own, f"{name} width")
                middle, mean = f"{torch.tensor(width).median():.2f}", f"{mean_and_error(width)[0]:.2f}"
                seconds = mean_and_error(chosen(own, f"{name} seconds"))[0]
                rows.append((way, str(n), name, held, middle, mean, f"{seconds:.2f}"))
    return markdown(header, rows)


def sets(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network, task and number of samples."""
    keys = ("covered", "size", "least", "covered by class", "size by class", "least by class",
            "covered empty", "size empty", "none empty")  # fmt: skip
    header = ["network", "task", "N", "right %", "held %", "classes", "least class %"]
    header += ["by class: held %", "classes", "least class %", "may be empty: held %", "classes", "empty %"]
    rows = []
    for key, name in TASKS:
        for n in COUNTS:
            where = {"network": NETWORKS[key].name, "task": name, "n": n}
            if right := chosen(cells, "accuracy", **where):
                row = [*map(str, where.values()), f"{100 * mean_and_error(right)[0]:.1f}"]
                for of in keys:
                    digits, scale = (2, 1) if of.startswith("size") else (1, 100)
                    row.append(with_error(chosen(cells, of, **where), digits, scale))
                rows.append(row)
    return markdown(header, rows)


PARTS = ("simulated", "values", "classes", "peers", "shift")


def main() -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=20)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = options.parse_args()
    study = Study("coverage/conformal", given)

    def compute(what: dict[str, Any]) -> dict[str, float]:
        n, seed, folder = what["n"], what["seed"], given.data_dir
        if what["part"] == "classes":
            return classes(what["key"], what["task"], n, seed, folder)
        if what["part"] == "shift":
            return shifted(what["way"], measured(what["task"], n, seed, folder), n, seed)
        if what["part"] == "peers":
            return beside_peers(what["way"], measured(what["task"], n, seed, folder), n, seed)
        if what["part"] == "values":
            return values(what["way"], measured(what["task"], n, seed, folder), n, seed)
        return raised(what["way"], simulated(what["task"], what["noise"], n, seed), n, seed)

    every: list[dict[str, Any]] = []
    for n in COUNTS:
        for seed in study.seeds:
            where = {"n": n, "seed": seed}
            for way in WAYS:
                tasks = [{"task": teacher, "noise": noise} for teacher in TEACHERS for noise in NOISES]
                every += [{"part": "simulated", "way": way, **task, **where} for task in tasks]
                every += [{"part": "values", "way": way, "task": name, **where} for name in UCI]
            for key, name in TASKS:
                at = {"key": key, "network": NETWORKS[key].name, "task": name}
                every.append({"part": "classes", **at, **where})
    every += [
        {"part": part, "way": way, "task": name, "n": n, "seed": seed}
        for part, counts in (("peers", PEER_COUNTS), ("shift", SHIFT_COUNTS))
        for n in counts
        for seed in study.seeds
        for way in WAYS
        for name in UCI
    ]
    every = [what for what in every if what["part"] in given.parts]
    every.sort(key=lambda what: str(what["task"]))  # a network and its samples are read once
    cells = [study.cell(what, partial(compute, what)) for what in every]
    parts = [simulations(cells), intervals(cells), sets(cells), peers(cells), shifts(cells)]
    study.publish("\n\n".join(parts), cells)


if __name__ == "__main__":
    main()
