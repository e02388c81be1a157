"""Steps in the coordinates of the kernel: the iterates of steps in the weights, taken where they pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import linnet.finetuning.recipe_runs as runs
from linnet.errors import InputError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import Bilinear
from linnet.finetuning.examples import Examples
from linnet.finetuning.kernel_steps import kernel_problem, pays
from linnet.finetuning.prepared import largest_eigenvalue
from linnet.tangent.linearized import linearize
from tests.finetuning.by_name import finetune
from tests.finetuning.test_finetune import images, net, same
from tests.fitting.problems import near, refused

IN_KERNEL = "coordinates of the kernel"


def either_way(monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The same call with steps in the kernel and in the weights."""
    found = []
    for verdict in (True, False):
        monkeypatch.setattr(runs, "pays", lambda *a, verdict=verdict: verdict)
        x, y = images(dtype=torch.float64)
        held = images(20, 2, torch.float64)
        found.append(
            finetune(net().double(), (x, y), method, held, steps=25, batch_size=16, log_every=1, **options)
        )
    return found[0], found[1]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("lqf", {"weight_decay": 0.0}),
        ("lqf", {"loss": "cross-entropy", "weight_decay": 0.0}),
        ("lqf", {"preconditioner": "none", "weight_decay": 1.0}),
        ("lqf", {"preconditioner": "ekfac", "weight_decay": 0.0, "schedule": "cosine"}),
        ("lqf", {"preconditioner": "block", "weight_decay": 0.0, "params": "^conv2", "learning_rate": 0.1}),
        ("gaf", {"weight_decay": 0.1, "clip": 0.5}),
        ("gaf", {"augmentation": "center", "keep": "best", "momentum": 0.0}),
        ("b-lqf", {"weight_decay": 0.0, "preconditioner": "diagonal", "pooling": Bilinear(channels=4)}),
    ],
)
@pytest.mark.thinned(6)
def test_the_iterates_are_the_same(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = either_way(monkeypatch, method, options)
    assert any(IN_KERNEL in note for note in fast.notes)
    assert not any(IN_KERNEL in note for note in slow.notes)
    x = images(30, 3, torch.float64)[0]
    base = slow.module.base(x)
    near(fast.predict(x) - base, slow.predict(x) - base, 1e-7)
    assert (fast.predict(x) - base).abs().max() > 1e-3
    for name, value in slow.module.delta.items():
        near(fast.module.delta[name].detach(), value.detach(), 1e-6)
    for a, b in zip(fast.history, slow.history, strict=True):
        assert a.keys() == b.keys()
        assert all(a[key] == pytest.approx(b[key], rel=1e-6) for key in a)
    values = [{k: v for k, v in run.settings.values.items() if v is not None} for run in (fast, slow)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert fast.validation == pytest.approx(slow.validation, rel=1e-6)


def test_weight_decay_may_be_left_out_only_where_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = either_way(monkeypatch, "lqf", {"weight_decay": 1e-5, "damping": 0.1})
    assert any(IN_KERNEL in note for note in fast.notes)
    x = images(30, 3, torch.float64)[0]
    moved = slow.predict(x) - slow.module.base(x)
    assert (fast.predict(x) - slow.predict(x)).norm() < 1e-4 * moved.norm()
    kept, _ = either_way(monkeypatch, "lqf", {"weight_decay": 0.5, "damping": 0.1})
    assert not any(IN_KERNEL in note for note in kept.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"augmentation": "random-crop"},
        {"clip": 1.0},  # with a preconditioner the norm is that of the weights' own step
        {"weight_decay": 100.0},
    ],
)
def test_other_runs_step_in_the_weights(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "pays", lambda *a: True)
    tuned = finetune(net(), images(), steps=2, batch_size=16, **options)
    assert not any(IN_KERNEL in note for note in tuned.notes)


def test_a_search_forms_one_kernel_and_a_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = runs.kernel_problem
    monkeypatch.setattr(runs, "pays", lambda *a: True)
    monkeypatch.setattr(runs, "kernel_problem", lambda *a: made.append(1) or plain(*a))
    options: dict[str, Any] = {"steps": 12, "batch_size": 16, "log_every": 1}
    rates = {"learning_rate": [0.001, 0.01, 0.1]}
    searched = finetune(net(), images(), search=rates, **options)
    assert len(made) == 2  # while a fifth is held out, and of everything
    taken = searched.settings.values["learning_rate"]
    assert same(searched, finetune(net(), images(), learning_rate=taken, **options))

    def stop(values: dict[str, float], step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    kept: dict[str, Any] = {**options, "checkpoint": tmp_path, "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        finetune(net(), images(), **kept, log=stop)
    steps: list[int] = []
    resumed = finetune(net(), images(), **kept, log=lambda _, step: steps.append(step))
    assert min(steps) == 6
    assert same(resumed, finetune(net(), images(), **options))
    refused(InputError, lambda: finetune(net(), images(), **kept, seed=3), "other settings")


def test_the_kernel_pays_for_many_steps_on_few_examples() -> None:
    lin, x = linearize(net()), images()[0][:1]
    assert pays(lin, x, (60, 0, 5), 10**7, None)
    assert not pays(lin, x, (60, 0, 5), 60, None)
    assert not pays(lin, x, (10**5, 0, 5), 10**7, None)
    assert not pays(lin, x, (60, 0, 5), 10**7, "1MB")


def test_the_largest_eigenvalue_is_that_of_the_steps() -> None:
    lin, data = linearize(net().double()), images(dtype=torch.float64)
    problem = kernel_problem(lin, None, (Examples(data, torch.device("cpu")), None), Augmentation())
    top = largest_eigenvalue(lin, data[0])
    assert problem.top(60) == pytest.approx(top, rel=1e-9)
    assert problem.top(60, 200) == pytest.approx(float(problem.values.max()) / 60, rel=1e-6)
