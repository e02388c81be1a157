"""Wrong labels behind encoders: the leave-one-out of one fit beside five folds of logistic regression.

A share of 1,000 labels is moved to another class. cleanlab (Northcutt, Jiang and Chuang, JAIR 2021) is given
what its users give it, the held-out probabilities of five folds; and, to tell the rule from the
probabilities, those of ``fit.loo_probs()``. Beside its lists are those of ``linnet.audit.mislabeled``, and
orders of all labels: by probability, by ``mislabeled``, and by the exact value of a sample, which is what
leaving it out does to the loss of 200 others whose labels are right (it needs these; the rest do not). All
have the same features. cleanlab and scikit-learn are to be installed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.adapt.encoded import IMAGES, TEXTS, encoded
from experiments.continual.class_stream import SETS
from experiments.labels.flipped import area, flipped
from experiments.selection.criteria import find
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

NAMES = (
    "aerial views", "food", "groceries", "Kannada digits", "traffic signs", "trash", "EuroSAT", "emotions",
    "subjectivity", "news",
)  # fmt: skip
LARGE = "CIFAR-100"  # of 5,000 samples, for the time alone
SHARES = (0.05, 0.2, 0.4)
COMPUTED, TESTED = 1000, 1000
FOLDS, TRUSTED = 5, 200
PENALTIES = (
    1.0,
    0.1,
    0.01,
    0.001,
)  # C; scikit-learn's own first, the best by the folds' log loss is the other
LISTS = ("cleanlab, folds", "cleanlab, best penalty", "cleanlab, leave-one-out", "suspected", "doubted")
ORDERS = ("folds", "folds, best penalty", "leave-one-out", "mislabeled", "value")


def by_folds(phi: Tensor, labels: Tensor, penalty: float, seed: int) -> Tensor:
    """Held-out probabilities of five folds of logistic regression on standardized features, (N, C)."""
    select: Any = importlib.import_module("sklearn.model_selection")
    linear: Any = importlib.import_module("sklearn.linear_model")
    scaling: Any = importlib.import_module("sklearn.preprocessing")
    pipeline: Any = importlib.import_module("sklearn.pipeline")
    regression = linear.LogisticRegression(C=penalty, max_iter=1000)
    model = pipeline.make_pipeline(scaling.StandardScaler(), regression)
    folds = select.StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    found = select.cross_val_predict(model, phi.numpy(), labels.numpy(), cv=folds, method="predict_proba")
    return torch.from_numpy(found)


def cleanlab(p: Tensor, labels: Tensor) -> Tensor:
    """Which labels cleanlab lists, (N,)."""
    rule: Any = importlib.import_module("cleanlab.filter")
    return torch.from_numpy(rule.find_label_issues(labels.numpy(), p.numpy(), n_jobs=1))


def values(fit: Any, trusted: tuple[Tensor, Tensor]) -> Tensor:
    """What leaving each sample out adds to the log loss of trusted samples, (N,)."""
    x, y = trusted
    outputs, temperature = fit.predict(x).double(), float(fit.point_temperature)
    nll = F.cross_entropy
    before = nll(outputs / temperature, y)
    changes = fit.influence(x).double()  # (N, T, C), of outputs by taking a sample in
    return torch.stack([nll((outputs - one) / temperature, y) - before for one in changes])


def timed(seconds: dict[str, float], name: str, make: Callable[[], Any]) -> Any:
    """A result, and how many seconds of the processor it took."""
    begin = time.process_time()
    found = make()
    seconds[name] = time.process_time() - begin
    return found


def recall_at(precision: float, score: Tensor, wrong: Tensor) -> float:
    """The most of the wrong labels that the first of an order hold with at least some precision."""
    hit = wrong[score.argsort(descending=True)].double().cumsum(0)
    enough = hit / torch.arange(1, len(hit) + 1) >= precision
    return float(hit[enough].max() / wrong.sum()) if enough.any() else 0.0


def compared(data: dict[str, Tensor], share: float, seed: int) -> dict[str, Any]:
    """Lists and orders on one draw of wrong labels."""
    phi = data["pool"].float()
    classes = int(data["pool labels"].max()) + 1
    labels, wrong = flipped(data["pool labels"], share, classes, seed)
    seconds: dict[str, float] = {}
    tried = [timed(seconds, f"folds, {c:g}", lambda c=c: by_folds(phi, labels, c, seed)) for c in PENALTIES]
    folds = tried[0], min(tried, key=lambda p: float(F.nll_loss(p.clamp_min(1e-12).log(), labels)))
    net = nn.Sequential(nn.Identity(), nn.Linear(phi.shape[1], classes))
    fit = timed(seconds, "fit", lambda: linnet.adapt(net, (phi, labels)))
    left_out = timed(seconds, "leave-one-out", lambda: fit.loo_probs().double())
    found = timed(seconds, "mislabeled", lambda: linnet.audit.mislabeled(fit))
    trusted = data["test"][:TRUSTED].float(), data["test labels"][:TRUSTED]
    value = timed(seconds, "value", lambda: values(fit, trusted))
    lists = torch.zeros(2, len(wrong), dtype=torch.bool)
    lists[0, found.suspected()], lists[1, found.doubted()] = True, True
    listed = (
        *(timed(seconds, "cleanlab", lambda p=p: cleanlab(p, labels)) for p in folds),
        cleanlab(left_out, labels),
        *lists,
    )
    result: dict[str, Any] = {"wrong": int(wrong.sum()), "seconds of": seconds}
    for name, doubts in zip(LISTS, listed, strict=True):
        result[f"{name}: doubted"] = int(doubts.sum())
        result[f"{name}: found"] = int((doubts & wrong).sum())
    own = [1 - p.gather(1, labels[:, None])[:, 0] for p in (*folds, left_out)]
    scores = dict(zip(ORDERS, (*own, found.scores, -value), strict=True))
    first = listed[1]
    precision = float((first & wrong).sum() / max(int(first.sum()), 1))
    for name, score in scores.items():
        result[f"{name}: area"] = area(score, wrong)
        result[f"{name}: recall"] = recall_at(precision, score, wrong)
    return result


# -- tables ----------------------------------------------------------------------------------------


def mean_of(cells: list[Cell], share: float, key: Callable[[Cell], float]) -> list[float]:
    """A number of every set, the mean of its draws."""
    found = []
    for name in NAMES:
        every = [key(cell) for cell in cells if cell["data"] == name and cell["share"] == share]
        if every:
            found.append(sum(every) / len(every))
    return found


def lists_table(cells: list[Cell]) -> str:
    """Markdown: precision and recall of the lists, means over sets."""
    rows = []
    for share in SHARES:
        row = [f"{share:.0%}"]
        for name in LISTS:
            precision = mean_of(
                cells, share, lambda cell, n=name: cell[f"{n}: found"] / max(cell[f"{n}: doubted"], 1)
            )
            recall = mean_of(cells, share, lambda cell, n=name: cell[f"{n}: found"] / cell["wrong"])
            row.append(f"{100 * sum(precision) / len(precision):.0f} / {100 * sum(recall) / len(recall):.0f}")
        rows.append(row)
    return markdown(["labels flipped", *(f"{name}, precision / recall %" for name in LISTS)], rows)


def orders_table(cells: list[Cell]) -> str:
    """Markdown: orders, with paired differences to the folds over sets."""
    rows = []
    for share in SHARES:
        for name in ORDERS:
            areas, recalls = (
                mean_of(cells, share, lambda cell, k=key: 100 * cell[k])
                for key in (f"{name}: area", f"{name}: recall")
            )
            base = mean_of(cells, share, lambda cell: 100 * cell["folds, best penalty: recall"])
            ahead = [a - b for a, b in zip(recalls, base, strict=True)]
            rows.append([
                f"{share:.0%}", name, with_error(areas), with_error(recalls),
                "–" if name == ORDERS[1] else with_error(ahead),
            ])  # fmt: skip
    header = ["labels flipped", "order by", "area, %", "recall at the precision of cleanlab's list, %"]
    return markdown([*header, "ahead of the folds, best penalty"], rows)


def seconds_table(cells: list[Cell]) -> str:
    """Markdown: seconds of the processor, means over sets, and of a larger set."""
    rows = []
    sizes = {
        "1,000 samples, mean of ten sets": [cell for cell in cells if cell["data"] != LARGE],
        "5,000 samples, 100 classes": [cell for cell in cells if cell["data"] == LARGE],
    }
    for what, some in sizes.items():
        every = chosen(some, "seconds of")
        one, best, ours = (
            sum(sum(seconds[part] for part in parts) for seconds in every) / len(every)
            for parts in (
                ("folds, 1", "cleanlab"), (*(f"folds, {c:g}" for c in PENALTIES), "cleanlab"),
                ("fit", "leave-one-out", "mislabeled"),
            )
        )  # fmt: skip
        rows.append([what, f"{one:.1f}", f"{best:.1f}", f"{ours:.1f}", f"{one / ours:.1f}"])
    header = ["samples", "five folds and cleanlab", "four penalties", "fit and both lists"]
    return markdown([*header, "first over last"], rows)


@lru_cache(maxsize=1)
def kept(name: str, folder: Path, data_dir: str | None) -> dict[str, Tensor]:
    """Features and labels of a set."""
    if name == LARGE:
        return encoded(*SETS[LARGE], 5000, 2000, folder, data_dir)
    task = find(name)
    return encoded(TEXTS if task.text else IMAGES, task, COMPUTED, TESTED, folder, data_dir)


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "")
    make.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    arguments = make.parse_args()
    study, cells = Study("labels/encoders", arguments), []

    def cell(name: str, share: float, seed: int) -> Cell:
        return study.cell(
            {"data": name, "share": share, "seed": seed},
            lambda: compared(kept(name, arguments.features, arguments.data_dir), share, seed),
        )

    for name in NAMES:
        cells += [cell(name, share, seed) for share in SHARES for seed in study.seeds]
    cells += [cell(LARGE, SHARES[1], seed) for seed in range(3)]
    tables = lists_table(cells), orders_table(cells), seconds_table(cells)
    study.publish("\n\n".join(tables), cells)


if __name__ == "__main__":
    main()
