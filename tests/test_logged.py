"""The numbers that reports, fits and results tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError
from linnet.logged import check_log, numbers
from linnet.optim.relinearize_report import LinearizationReport


def test_numbers_are_taken_out_of_what_is_inside_others() -> None:
    told = {
        "ridge": 2,
        "taken": True,
        "why": "so",
        "missing": None,
        "seconds": {"fit": 0.5, "of": {"kernel": 0.25}},
        "scores": [{"name": "probe", "nll": 1.0, "note": "x"}, {"name": "fit", "nll": 0.5}, {"nll": 3.0}, 7],
        "loss": torch.tensor(1.5, requires_grad=True),
        "right": torch.tensor([True]),
        "many": torch.ones(3),
        "complex": torch.tensor(1j),
        3: 4.0,
    }
    assert numbers(told) == {
        "ridge": 2.0, "taken": 1.0, "seconds/fit": 0.5, "seconds/of/kernel": 0.25, "scores/probe/nll": 1.0,
        "scores/fit/nll": 0.5, "loss": 1.5, "right": 1.0, "3": 4.0,
    }  # fmt: skip
    assert all(type(value) is float for value in numbers(told).values())


@pytest.mark.parametrize("told", [3.0, "text", None, [1.0, 2.0], torch.ones(2), {}, object()])
def test_what_has_no_names_has_no_numbers(told: object) -> None:
    assert numbers(told) == {}


def test_numbers_of_fits_and_reports(float64: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(12, 3), torch.arange(12) % 2
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge=0.5)
    found = numbers(fit)
    assert (found["ridge"], found["examples"]) == (0.5, 12.0)
    assert found["noise"] == fit.noise
    report = linnet.evaluate(fit, (x, y))
    assert numbers(report)["accuracy"] == pytest.approx(report.accuracy)
    step = linnet.optim.GaussNewton(net, linnet.likelihoods.Categorical(), damping=1.0).step(x, y)
    assert {name: value for name, value in step._asdict().items() if value is not None} == numbers(step)
    found = numbers(LinearizationReport("Every(4)", 8, (4, 8), ((4, "gap", 0.5),)))
    assert found == {"steps": 8.0, "relinearizations": 2.0, "mean_period": 4.0}


def test_a_log_is_a_function() -> None:
    assert check_log(None) is None
    with pytest.raises(InputError, match="a function of a dict of numbers and a step"):
        check_log("tensorboard")
