"""Fits under the caller's modes: inference mode, no gradients, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.fitting import CG

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
X, Y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2


def network() -> nn.Module:
    """A network of six hidden units."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["lqf", "gaf", "nlft", "fc", "lqf-fc"])
@pytest.mark.thinned(3)
def test_fine_tuning_does_not_depend_on_them(mode: str, method: str) -> None:
    def tuned() -> Any:
        return linnet.finetune(network(), (X, Y), method, training=linnet.Training(steps=3))

    expected = tuned().predict(X)
    with MODES[mode]():
        made = tuned()
    torch.testing.assert_close(made.predict(X), expected)


@pytest.mark.parametrize("mode", MODES)
def test_audits_do_not_depend_on_them(mode: str) -> None:
    fit = linnet.fit(linnet.linearize(network()), (X, Y))
    asked: list[Callable[[], Tensor]] = [
        lambda: linnet.audit.loss_influence(fit, X[:3], Y[:3]),
        lambda: linnet.audit.influence(fit, X[:3], method="ekfac").outputs,
        lambda: linnet.audit.weight_changes(fit),
    ]
    expected = [question() for question in asked]
    with MODES[mode]():
        found = [question() for question in asked]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.thinned(4)
@pytest.mark.long
def test_questions_to_a_fit_without_a_kernel_do_not_depend_on_them(mode: str, loss: str) -> None:
    asked: list[Callable[[Any], Tensor]] = [
        lambda fit: fit.loo(),
        lambda fit: fit.influence(X[:3]),
        lambda fit: fit.informativeness(),
        lambda fit: fit.predictive(X[:3]).probs,
        lambda fit: fit.forget([0]).predict(X),
        lambda fit: fit.update((X[:2] + 1, Y[:2])).predict(X),
    ]
    if loss == "squared":
        asked.append(lambda fit: fit.constrain(X[:1], Y[:1]).loo())
        asked.append(lambda fit: linnet.audit.mislabeled(fit).scores)
        asked.append(lambda fit: torch.tensor(fit.temperature))

    def solved() -> Any:
        return linnet.fit(linnet.linearize(network()), (X, Y), loss, solver=CG(preconditioner="none"))

    expected = [question(solved()) for question in asked]
    fits = [solved() for _ in asked]
    with MODES[mode]():
        found = [question(fit) for question, fit in zip(asked, fits, strict=True)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.thinned(2)
def test_a_fit_made_in_inference_mode_is_like_any_other(solver: str, loss: str) -> None:
    def solved() -> Any:
        return linnet.fit(
            linnet.linearize(network()),
            (X, Y),
            loss,
            solver=CG(preconditioner="ekfac") if solver == "cg" else solver,
        )

    expected = solved()
    with torch.inference_mode():
        fit = solved()
    torch.testing.assert_close(fit.predict(X), expected.predict(X))
    fit.module(X).sum().backward()
    assert all(parameter.grad is not None for parameter in fit.module.parameters())


def test_data_made_in_inference_mode_are_like_any_others() -> None:
    with torch.inference_mode():
        x = X.clone()
    lin = linnet.linearize(network())
    fit = linnet.fit(lin, (x, Y))
    torch.testing.assert_close(fit.influence(x), linnet.fit(lin, (X, Y)).influence(X))
    torch.testing.assert_close(fit.module(x), fit.module(X))
