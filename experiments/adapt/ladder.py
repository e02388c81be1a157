"""Gain of each stage beyond a linear probe on new tasks: the nested fit, trained lower layers, fine-tuning.

``python -m experiments.adapt.ladder --sets development --networks resnet20 mobilenet --shots 20``
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import linnet
from experiments.adapt.kernels import SETS, suited
from experiments.adapt.nested import drawn as shots_of
from experiments.adapt.rivals import EPOCHS, STEPS
from experiments.adapt.tasks import NETWORKS, Network, Task, drawn
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, with_error
from linnet.fitting.descent import HEAD_SCALE, fine_tune, nearest_class_mean
from linnet.fitting.last_layer import features
from linnet.nested.tuning import tuned
from linnet.plots.measures import calibration_error, equal_mass_bins
from linnet.tangent.batch import Inputs, batch_size, take

BATCH = 32
METHODS = ("probe", "logistic", "class means", "neighbors", "nested", "ladder", "fine-tuning")
NEIGHBORS = 5  # or as many as a class has images
Data = tuple[Inputs, Tensor]


def judged(name: str, probabilities: Tensor, truth: Tensor, start: float) -> dict[str, float]:
    """Accuracy, log loss, calibration error and seconds of a method."""
    right = probabilities[torch.arange(len(truth)), truth].clamp_min(1e-12)
    confidence, taken = probabilities.max(1)
    bins = equal_mass_bins(confidence.numpy(), (taken == truth).numpy())
    return {
        name: float((taken == truth).double().mean()),
        f"{name} log loss": float(-right.log().mean()),
        f"{name} calibration": calibration_error(bins),
        f"{name} seconds": time.perf_counter() - start,
    }


def regressed(model: nn.Module, data: Data, x: Inputs, seed: int) -> Tensor:
    """Probabilities of logistic regression on standardized features, its penalty by cross-validation."""
    phi, test = (features(model, part).double().numpy() for part in (data[0], x))
    folds = max(2, min(5, int(data[1].bincount()[data[1].unique()].min())))
    regression = LogisticRegressionCV(
        Cs=list(np.logspace(-4, 2, 13)), cv=folds, scoring="neg_log_loss", max_iter=2000, random_state=seed
    )
    fitted = make_pipeline(StandardScaler(), regression).fit(phi, data[1].numpy())
    found = torch.zeros(batch_size(x), int(data[1].max()) + 1, dtype=torch.float64)
    found[:, torch.from_numpy(fitted.classes_)] = torch.from_numpy(fitted.predict_proba(test))
    return found


def neighbors(model: nn.Module, data: Data, x: Inputs, shots: int) -> Tensor:
    """Shares of classes among the nearest training images by the cosine of features, smoothed by one."""
    train, test = (nn.functional.normalize(features(model, part).double()) for part in (data[0], x))
    near = (test @ train.T).topk(min(NEIGHBORS, shots)).indices
    votes = nn.functional.one_hot(data[1][near], int(data[1].max()) + 1).double().sum(1)
    return (votes + 1 / votes.shape[1]) / (votes.sum(1, keepdim=True) + 1)


def cell(
    network: Network, task: Task, shots: int, seed: int, tested: int, folds: int, folder: str | None
) -> dict[str, float]:
    """Every method on one draw."""
    model, prepared = network.load(folder)
    x, y, xt, yt = drawn(task, network, prepared, 600, tested, folder)
    at = shots_of(y, shots, seed)
    data = take(x, at), y[at]
    steps = max(STEPS[-1], -(-EPOCHS * len(at) // BATCH))
    start = time.perf_counter()
    probe = linnet.adapt(model, data, weight=0.0)
    found = judged("probe", probe.predictive(xt).probs, yt, start)
    start = time.perf_counter()
    fit = linnet.adapt(model, data, seed=seed)
    found |= judged("nested", fit.predictive(xt).probs, yt, start)
    top = tuned(fit, seed)
    found |= judged("ladder", top.predictive(xt).probs, yt, start)
    found |= {"trained": float(top.trained), "weight": fit.body_weight}
    start = time.perf_counter()
    classes = fit.system.c
    headed = linnet.with_head(model, classes, linnet.Probe(scale=HEAD_SCALE), data=data)
    plain = fine_tune(headed, data, steps, BATCH, seed=seed, optimizer="adam", folds=folds)
    found |= judged("fine-tuning", plain.predict(xt).double().softmax(1), yt, start)
    start = time.perf_counter()
    found |= judged("logistic", regressed(model, data, xt, seed), yt, start)
    start = time.perf_counter()
    distances = nearest_class_mean(model, data, xt).double()
    spread = -distances.amax(1).median().clamp_max(-1e-12)
    found |= judged("class means", (distances / spread).softmax(1), yt, start)
    start = time.perf_counter()
    found |= judged("neighbors", neighbors(model, data, xt, shots), yt, start)
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network, task and number of shots."""
    methods = [name for name in METHODS if all(name in cell for cell in cells)]  # older cells have fewer
    names = ("network", "task", "a class", "draws", *methods, "ladder − fine-tuning", "trained")
    lines = [f"| {' | '.join(names)} |", f"|---|---|{'---:|' * (len(names) - 2)}"]
    for network, task, shots in dict.fromkeys((c["network"], c["task"], c["shots"]) for c in cells):
        where = {"network": network, "task": task, "shots": shots}
        columns = [chosen(cells, name, **where) for name in methods]
        ahead = [a - b for a, b in zip(columns[-2], columns[-1], strict=True)]
        values = [with_error(column, scale=100) for column in (*columns, ahead)]
        taken = chosen(cells, "trained", **where)
        row = (network, task, str(shots), str(len(taken)), *values, f"{sum(taken):.0f} of {len(taken)}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def summary(cells: Sequence[Cell]) -> str:
    """Differences from fine-tuning, shares of its gain on the probe, means of scores, and times."""
    lines = []
    for part in dict.fromkeys(cell["set"] for cell in cells):
        own = [cell for cell in cells if cell["set"] == part]
        for first, second in (("ladder", "fine-tuning"), ("nested", "fine-tuning"), ("ladder", "nested")):
            columns = (chosen(own, name) for name in (first, second))
            ahead = [a - b for a, b in zip(*columns, strict=True)]
            lines.append(f"{part}, {first} - {second}: {with_error(ahead, scale=100)} points")
    probe, tuned_, *models = (chosen(cells, name) for name in ("probe", "fine-tuning", "nested", "ladder"))
    for name, model in zip(("nested", "ladder"), models, strict=True):
        shares = [(m - p) / (t - p) for m, p, t in zip(model, probe, tuned_, strict=True) if t - p >= 0.02]
        lines.append(
            f"{name}, median share of the gain of fine-tuning ({len(shares)} cells): {median(shares):.2f}"
        )
    for score in ("log loss", "calibration"):
        each = (f"{name} {mean(chosen(cells, f'{name} {score}')):.3f}" for name in METHODS)
        lines.append(f"mean {score}: {', '.join(each)}")
    times = zip(chosen(cells, "ladder seconds"), chosen(cells, "fine-tuning seconds"), strict=True)
    lines.append(
        f"time of the ladder over that of fine-tuning, median: {median(a / b for a, b in times):.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for."""
    arguments = parser(__doc__ or "", seeds=2)
    arguments.add_argument("--sets", nargs="+", default=["development"], choices=list(SETS))
    arguments.add_argument("--networks", nargs="+", default=["resnet20", "mobilenet"], choices=list(NETWORKS))
    arguments.add_argument("--tasks", nargs="+", default=None, help="names of tasks (default: all)")
    arguments.add_argument("--shots", nargs="+", type=int, default=[20])
    arguments.add_argument("--tested", type=int, default=300, help="test images (default %(default)s)")
    arguments.add_argument("--folds", type=int, default=5, help="folds that choose the rate of fine-tuning")
    arguments.add_argument("--first-seed", type=int, default=0, help="first draw (default %(default)s)")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads or torch.get_num_threads())
    study, cells = Study("adapt/ladder", given), []
    for seed in study.seeds[given.first_seed :]:  # a draw of everything before the next one
        for part in given.sets:
            for key in given.networks:
                for task in suited(part, NETWORKS[key]):
                    if given.tasks and task.name not in given.tasks:
                        continue
                    for shots in given.shots:
                        where = {"set": part, "network": NETWORKS[key].name, "task": task.name}
                        what = {**where, "shots": shots, "seed": seed, "tested": given.tested}
                        what["folds"] = given.folds
                        run = (NETWORKS[key], task, shots, seed, given.tested, given.folds, given.data_dir)
                        cells.append(study.cell(what, lambda run=run: cell(*run)))
    study.publish(table(cells), cells)
    print(summary(cells))


if __name__ == "__main__":
    main()
