"""Numbers in TensorBoard, Weights & Biases, MLflow and a table, with stand-ins for what is not installed."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import DependencyError, InputError
from linnet.integrations.logs import log_to
from linnet.likelihoods import Gaussian

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls() -> Calls:
    """What the packages were called with."""
    return []


def module(patch: pytest.MonkeyPatch, name: str, **things: Any) -> Any:
    """Put a module in place of a package."""
    made = ModuleType(name)
    vars(made).update(things)
    patch.setitem(sys.modules, name, made)
    return made


def tensorboard(patch: pytest.MonkeyPatch, calls: Calls) -> Any:
    """Stand in for torch's writer."""

    def writer(folder: str) -> Any:
        calls.append(("open", folder))
        return SimpleNamespace(
            add_scalar=lambda *given: calls.append(given),
            flush=lambda: calls.append(("flush",)),
            close=lambda: calls.append(("close",)),
        )

    return module(patch, "torch.utils.tensorboard", SummaryWriter=writer)


def wandb(patch: pytest.MonkeyPatch, calls: Calls) -> Any:
    """Stand in for Weights & Biases."""
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append(("close",))
    )

    def init(project: str) -> Any:
        calls.append(("open", project))
        return run

    return module(patch, "wandb", run=None, init=init)


def mlflow(patch: pytest.MonkeyPatch, calls: Calls) -> Any:
    """Stand in for MLflow."""
    run = SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def start() -> Any:
        calls.append(("open", "a run"))
        return run

    return module(
        patch,
        "mlflow",
        active_run=lambda: None,
        start_run=start,
        set_tracking_uri=lambda uri: calls.append(("uri", uri)),
        log_metrics=lambda values, step, run_id: calls.append((values, step, run_id)),
        end_run=lambda: calls.append(("close",)),
    )


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    tensorboard(monkeypatch, calls)
    with log_to("tensorboard:runs/a") as log:
        assert not calls  # nothing before the first number
        log({"why": "no number"}, 1)
        assert not calls
        log({"loss": 0.5, "seconds": {"fit": 2.0}}, 3)
        log({"loss": 0.25}, 4)
    flush = ("flush",)
    wanted = [("loss", 0.5, 3), ("seconds/fit", 2.0, 3), flush, ("loss", 0.25, 4), flush]
    assert calls == [("open", "runs/a"), *wanted, ("close",)]
    log.close()  # once more changes nothing
    assert calls[-2] == flush


def test_wandb(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    package = wandb(monkeypatch, calls)
    with log_to("wandb:first") as log:
        log({"loss": 0.5}, 3)
    assert calls == [("open", "first"), ({"loss": 0.5}, 3), ("close",)]
    calls.clear()
    package.run = package.init("mine")  # that is active: used and left
    with log_to("wandb:first") as log:
        log({"loss": 0.5}, 4)
    assert calls == [("open", "mine"), ({"loss": 0.5}, 4)]


def test_mlflow(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    package = mlflow(monkeypatch, calls)
    with log_to("mlflow:http://here:5000") as log:
        log({"scores": {"cat (old)": 0.5}}, 3)
    wanted = ({"scores/cat _old_": 0.5}, 3, "r")
    assert calls == [("uri", "http://here:5000"), ("open", "a run"), wanted, ("close",)]
    calls.clear()
    package.active_run = lambda: SimpleNamespace(info=SimpleNamespace(run_id="mine"))
    with log_to("mlflow:") as log:
        log({"loss": 0.5}, 4)
    assert calls == [({"loss": 0.5}, 4, "mine")]


def rows(file: Path) -> list[list[str]]:
    """A table as text."""
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.reader(opened))


def test_a_table(tmp_path: Path) -> None:
    file = tmp_path / "new" / "numbers.csv"
    with log_to(f"csv:{file}") as log:
        assert not file.exists()
        log({"a, b": 0.1, "n": 3}, 2)
        log({"n": 4}, 5)
        assert len(rows(file)) == 4  # what was told is on the disk, should the run be killed
    assert rows(file) == [
        ["step", "name", "value"],
        ["2", "a, b", "0.1"],
        ["2", "n", "3.0"],
        ["5", "n", "4.0"],
    ]
    with pytest.raises(InputError, match="exists"):
        log_to(f"csv:{file}")


@pytest.mark.parametrize("where", ["", "runs", "csv:", "wandb:", "paper:x", 3, None, Path("a")])
def test_places_that_are_none(where: Any) -> None:
    with pytest.raises(InputError, match="tensorboard:FOLDER"):
        log_to(where)


def test_a_misspelled_place() -> None:
    with pytest.raises(InputError, match=r'did you mean "tensorboard:runs/a"\?'):
        log_to("tensorbord:runs/a")


@pytest.mark.parametrize(
    ("where", "package"),
    [("tensorboard:x", "torch.utils.tensorboard"), ("wandb:x", "wandb"), ("mlflow:", "mlflow")],
)
def test_missing_packages_are_told_at_once(where: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyError, match=rf"pip install {where.partition(':')[0]}"):
        log_to(where)


def test_failures_of_a_package_are_explained(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    package = mlflow(monkeypatch, calls)

    def fail(*given: Any, **named: Any) -> None:
        raise ConnectionError("no server")

    package.log_metrics = fail
    with pytest.raises(DependencyError, match=r"mlflow:uri \(ConnectionError: no server\)") as caught:
        log_to("mlflow:uri")({"loss": 1.0}, 0)
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_place_that_fails_on_the_way_keeps_the_training(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, float64: torch.dtype
) -> None:
    package = mlflow(monkeypatch, calls)
    tried = []

    def twice(values: Any, step: int, run_id: str) -> None:
        tried.append(step)
        if len(tried) > 2:
            raise ConnectionError("the server is gone")

    package.log_metrics = twice
    torch.manual_seed(0)
    x, labels = torch.randn(16, 2), torch.arange(16) % 2
    net, training = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), linnet.Training(steps=5)

    def tune(log: Any) -> Any:
        return linnet.finetune(
            net, (x, labels), "nlft", training=training, run=linnet.Run(log=log, log_every=1)
        )

    log = log_to("mlflow:uri")
    with pytest.warns(RuntimeWarning, match=r"the record ends before step 2: .*the server is gone"):
        tuned = tune(log)
    assert tried == [0, 1, 2]  # a server that is gone is not asked again
    assert [h["loss"] for h in tuned.history] == [h["loss"] for h in tune(None).history]
    with pytest.raises(DependencyError, match="the server is gone"):
        log.close()
    assert calls[-1] == ("close",)
    log.close()  # said once
    with pytest.raises(ZeroDivisionError), log_to("mlflow:uri") as log:  # noqa: PT012
        package.log_metrics = lambda values, step, run_id: None
        log({"loss": 1.0}, 0)
        package.log_metrics = twice
        with pytest.warns(RuntimeWarning):
            log({"loss": 1.0}, 1)
        _ = 1 / 0


def test_an_error_of_a_users_log_is_the_users_and_says_what_is_done(tmp_path: Path) -> None:
    class Pruned(Exception):
        pass

    def stop(values: Any, step: int) -> None:
        raise Pruned

    torch.manual_seed(0)
    net, x = nn.Linear(2, 1), torch.randn(16, 2)
    optimizer = linnet.optim.GaussNewton(net, Gaussian(), log=stop)
    training = linnet.optim.IterativeLinearization(net, lambda p: torch.optim.SGD(p, 0.1), 5, log=stop)
    steps = {
        lambda: optimizer.step(x, x[:, :1]): optimizer,
        lambda: training.step(lambda module: module(x).square().mean()): training,
    }
    for step, of in steps.items():
        before = net.weight.clone()
        with pytest.raises(Pruned) as caught:
            step()
        assert "at step 1: the step is complete" in caught.value.__notes__[0]
        assert not torch.equal(net.weight, before)
        assert of.steps == 1  # type: ignore[attr-defined]
    how: dict[str, Any] = {"training": linnet.Training(steps=2)}
    relu, labels = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), torch.arange(16) % 2
    for folder, words in (
        (None, "the same call would go on"),
        (tmp_path / "run", "goes on from the last state"),
    ):
        run = linnet.Run(log=stop, checkpoint=folder)
        with pytest.raises(Pruned) as caught:
            linnet.finetune(relu, (x, labels), "nlft", run=run, **how)
        assert words in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "place", ["csv:{}/file/numbers.csv", "csv:/proc/none/numbers.csv", "tensorboard:{}/file"]
)
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    tensorboard(monkeypatch, calls)
    (tmp_path / "file").touch()
    with pytest.raises(linnet.errors.LinnetError, match="cannot be written"):
        log_to(place.format(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trying_a_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    tensorboard(monkeypatch, calls)
    (tmp_path / "old").mkdir()
    for place in ("csv:{}/new/deep/numbers.csv", "csv:{}/old/numbers.csv", "tensorboard:{}/new/board"):
        log_to(place.format(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


@pytest.mark.parametrize("values", [None, 3, "a", [1], torch.ones(3)])
def test_what_has_no_numbers(values: Any, tmp_path: Path) -> None:
    with log_to(f"csv:{tmp_path / 'table.csv'}") as log, pytest.raises(InputError, match="values"):
        log(values)
    assert not list(tmp_path.iterdir())


def test_a_table_that_came_meanwhile(tmp_path: Path) -> None:
    with log_to(f"csv:{tmp_path / 'table.csv'}") as first, log_to(f"csv:{tmp_path / 'table.csv'}") as second:
        first({"a": 1.0})
        with pytest.raises(InputError, match="a new file"):
            second({"a": 1.0})


@pytest.mark.parametrize("step", [-1, 0.5, "1"])
def test_steps_are_whole_numbers(step: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="step"):
        log_to(f"csv:{tmp_path}/numbers.csv")({"loss": 1.0}, step)


def values_of(file: Path, name: str) -> list[float]:
    """A column of numbers, by step."""
    return [float(value) for _, other, value in rows(file)[1:] if other == name]


def test_optimizers_and_fits_are_written(tmp_path: Path, float64: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 2)
    y = x.prod(1, keepdim=True)
    with log_to(f"csv:{tmp_path}/steps.csv") as log:
        optimizer = linnet.optim.GaussNewton(net, Gaussian(), damping=1.0, log=log)
        reports = [optimizer.step(x, y) for _ in range(3)]
    assert values_of(tmp_path / "steps.csv", "loss") == [report.loss for report in reports]
    assert not values_of(tmp_path / "steps.csv", "step")
    with log_to(f"csv:{tmp_path}/lin.csv") as log:
        training = linnet.optim.IterativeLinearization(
            net, lambda p: torch.optim.SGD(p, lr=0.01), period=2, record_gap=True, log=log
        )
        losses = [float(training.step(lambda f: (f(x) - y).square().mean())) for _ in range(4)]
    assert values_of(tmp_path / "lin.csv", "loss") == losses
    assert values_of(tmp_path / "lin.csv", "feature updates") == [0.0, 1.0, 1.0, 2.0]
    assert values_of(tmp_path / "lin.csv", "gap") == [value for _, value in training.report.gaps]
    fit = linnet.fit(linnet.linearize(net), (x, y), "squared", ridge="loo")
    with log_to(f"csv:{tmp_path}/fit.csv") as log:
        log(fit)
    assert values_of(tmp_path / "fit.csv", "ridge") == [fit.ridge]
    with log_to(f"csv:{tmp_path}/tuned.csv") as log:
        labels, how = (y[:, 0] > 0).long(), {"training": linnet.Training(epochs=2)}
        tuned = linnet.finetune(net, (x, labels), "nlft", run=linnet.Run(log=log, log_every=1), **how)
    assert values_of(tmp_path / "tuned.csv", "loss") == [h["loss"] for h in tuned.history if "loss" in h]


@pytest.mark.filterwarnings("default")
def test_tensorboard_itself(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with log_to(f"tensorboard:{tmp_path}") as log:
        for step in range(3):
            log({"loss": 1 / (step + 1)}, step)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(one.step, round(one.value, 3)) for one in found.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.333),
    ]
