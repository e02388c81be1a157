"""When training of the lower layers is to be kept: rules by what held-out folds show, on development tasks.

Every run is taken to its end, whatever the folds say: the gain in test accuracy of the fit at the trained
weights is what a rule has where it keeps training, and zero where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import linnet
from experiments.adapt.nested import drawn as shots_of
from experiments.adapt.rivals import loaded
from experiments.adapt.tasks import DEVELOPMENT, NETWORKS, drawn
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.nested import tuning
from linnet.tangent.batch import take

TASKS = (
    *(("resnet20", name, 10) for name in ("hand signs", "EuroSAT", "flowers 64", "scenes", "steel defects")),
    *(
        ("resnet20", name, shots)
        for name in ("Fashion-MNIST", "MNIST", "spoken digits")
        for shots in (10, 30)
    ),
    *(("minilm6", name, 20) for name in ("question types", "film reviews", "news")),
)
POOL, TESTED = 3000, 1000
RULES: dict[str, Callable[[Cell], bool]] = {
    "always": lambda cell: True,
    "unless more error by one standard error": lambda cell: cell["gain"] > -cell["gain error"],
    "less error by one standard error": lambda cell: cell["gain"] > cell["gain error"],
    "no fewer right, nor more error by one standard error": lambda cell: (
        cell["points"] >= 0 and cell["gain"] > -cell["gain error"]
    ),
    "more right": lambda cell: cell["points"] > 0,
    "more right by one standard error": lambda cell: cell["points"] > cell["points error"],
}


@contextmanager
def whatever_folds_say() -> Iterator[None]:
    """Take every training to its end, and keep it."""
    ladder, least = tuning.ladder, tuning.ERRORS

    def taken(*given: Any) -> Any:
        *others, last = ladder(*given)
        return (*(replace(one, taken=False) for one in others), replace(last, taken=True))

    tuning.ladder, tuning.ERRORS = taken, 1e9
    try:
        yield
    finally:
        tuning.ladder, tuning.ERRORS = ladder, least


def measured(key: str, name: str, shots: int, seed: int, data_dir: str | None) -> dict[str, float]:
    """Test accuracies before and after training, and what the folds showed."""
    network = NETWORKS[key]
    model, prepared = loaded(network, data_dir, "cpu")
    task = next(one for one in DEVELOPMENT if one.name == name)
    x, y, xt, yt = drawn(task, network, prepared, POOL, TESTED, data_dir)
    at = shots_of(y, shots, seed)
    fit = linnet.adapt(model, (take(x, at), y[at]), seed=seed)
    before = _right(fit.predict(xt), yt)
    with whatever_folds_say():
        trained = tuning.tuned(fit, seed)
    top = trained.rungs[-1]
    assert trained.trained
    shown = {
        name.replace("_", " "): getattr(top, name)
        for name in ("gain", "gain_error", "points", "points_error")
    }
    return {"n": len(at), "before": before, "after": _right(trained.predict(xt), yt), **shown}


def _right(outputs: Tensor, y: Tensor) -> float:
    """Per cent of right classes."""
    return 100 * float((outputs.argmax(1) == y).double().mean())


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a rule, with its mean gain, the worst, and the runs that it keeps."""
    rows = []
    for name, rule in RULES.items():
        gains = [cell["after"] - cell["before"] if rule(cell) else 0.0 for cell in cells]
        kept = sum(map(rule, cells))
        rows.append((name, f"{kept} of {len(cells)}", with_error(gains), f"{min(gains):.1f}"))
    return markdown(("training is kept", "runs", "points of test accuracy", "worst run"), rows)


def main() -> None:
    """Run the study."""
    given = parser(__doc__ or "", seeds=2).parse_args()
    study, cells = Study("adapt/kept", given), []
    for key, name, shots in TASKS:
        for seed in study.seeds:

            def compute(key: str = key, name: str = name, shots: int = shots, seed: int = seed) -> Any:
                torch.manual_seed(seed)
                return measured(key, name, shots, seed, given.data_dir)

            what = {"network": NETWORKS[key].name, "task": name, "shots": shots, "seed": seed}
            cells.append(study.cell(what, compute))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
