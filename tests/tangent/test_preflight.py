"""The preflight: what it says about a network before anything long is started."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from tests.fitting.problems import network, real
from tests.refusals import refused
from tests.zoo import BY_NAME

X = real(4, 3)


def treatment(report: Any, name: str) -> str:
    return next(p.treatment for p in report.parameters if p.name == name)


def test_a_plain_network_is_ready() -> None:
    report = linnet.preflight(network(), X)
    assert report.ok
    assert report.model == "Sequential"
    assert report.outputs == 3
    assert report.total == 38
    assert report.jvp == "forward"
    assert report.findings == ()
    assert [(p.name, p.shape, p.uses, p.exact) for p in report.parameters] == [
        ("0.weight", (5, 3), 1, False),
        ("0.bias", (5,), 1, False),
        ("2.weight", (3, 5), 1, False),
        ("2.bias", (3,), 1, False),
    ]
    assert treatment(report, "0.weight") == "linear"
    assert treatment(report, "2.bias") == "shift"


def test_the_printed_report() -> None:
    text = str(linnet.preflight(network(), X, memory="1MB"))
    lines = text.splitlines()
    assert "Sequential: 4 parameters tracked (P = 38), 3 outputs" in lines
    assert ["0.weight", "5×3", "linear"] in [line.split() for line in lines]
    assert "directional derivatives: forward" in text
    assert "kernel of 4 × 4 examples" in text
    assert "budget of 1.00 MB" in text
    assert lines[0] == "ready"


def test_json() -> None:
    report = json.loads(json.dumps(linnet.preflight(network(), X).to_dict()))
    assert report["total"] == 38
    assert report["parameters"][0]["name"] == "0.weight"
    assert report["ok"] is True


def test_a_linearization_can_be_checked_as_well() -> None:
    lin = linnet.linearize(network(), params="last-layer")
    report = linnet.preflight(lin, X)
    assert [p.name for p in report.parameters] == lin.parameter_names
    assert any("2 parameter(s) are left out" in finding for finding in report.findings)
    assert str(linnet.preflight(network(), X, params="last-layer")) == str(report)


# --- what makes results wrong -----------------------------------------------------------------------


class AlwaysDropout(nn.Module):
    """Dropout that ignores evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.net(x), 0.5, training=True)


class BatchCentered(nn.Module):
    """Every output depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return h - h.mean(0)


def test_a_random_network_is_not_ready() -> None:
    report = linnet.preflight(AlwaysDropout(), X)
    assert not report.ok
    assert "random in evaluation mode" in report.findings[0]
    assert str(report).startswith("NOT ready")
    assert report.total == sum(p.numel() for p in AlwaysDropout().parameters())
    assert {one.treatment for one in report.parameters} == {"not examined"}
    refused(
        ModelError,
        lambda: linnet.fit(linnet.linearize(AlwaysDropout()), (X, torch.eye(3).to(X)[[0, 1, 2, 0]])),
        "random in evaluation mode",
        "training=self.training",
    )


def test_a_network_whose_examples_depend_on_each_other_is_not_ready() -> None:
    report = linnet.preflight(BatchCentered(), X)
    assert not report.ok
    assert any("depend on the other examples" in finding for finding in report.findings)
    assert str(report).startswith("NOT ready")


class NeedsTwo(nn.Module):
    """Cannot run on one example."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("more than one example, please")
        return self.net(x)


def test_a_network_that_needs_a_batch_is_not_ready() -> None:
    report = linnet.preflight(NeedsTwo(), X)
    assert not report.ok
    assert any("one example alone (more than one example, please)" in finding for finding in report.findings)


# --- what a user should know -------------------------------------------------------------------------


def test_training_mode_is_told_and_left_as_it_is() -> None:
    model = BY_NAME["dropout-train"].factory()
    assert model.training
    report = linnet.preflight(model, BY_NAME["dropout-train"].make_batch())
    assert report.ok
    (finding,) = [f for f in report.findings if "training mode" in f]
    assert "BatchNorm1d, Dropout" in finding
    assert model.training
    assert linnet.preflight(network().train(), X).findings == ()


def test_unused_parameters_are_named() -> None:
    model = BY_NAME["plain-arithmetic"].factory()
    report = linnet.preflight(model, BY_NAME["plain-arithmetic"].make_batch())
    unused = [p.name for p in report.parameters if p.treatment.startswith("unused")]
    assert len(unused) == 1
    assert any("do not depend on 1 parameter(s)" in f and repr(unused[0]) in f for f in report.findings)
    assert report.ok


class Odd(nn.Module):
    """A parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.power = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net(x)) ** self.power


def test_parameters_without_a_rule_are_named_with_the_operation() -> None:
    report = linnet.preflight(Odd(), X)
    assert treatment(report, "power") == "example by example (no rule for pow)"
    assert next(p for p in report.parameters if p.name == "power").exact
    assert any(
        "1 parameter(s) are differentiated example by example" in f and "'power'" in f
        for f in report.findings
    )
    assert report.ok


@pytest.mark.parametrize(
    ("name", "parameter", "words"),
    [
        ("tied-linears", None, "linear, 2 uses"),
        ("tied-embedding", None, "embedding and linear, 2 uses"),
        ("conv3d", None, "convolution"),
        ("norms", None, "scale"),
        ("weight-norm", None, "through a tensor computed from it"),
    ],
)
def test_treatments(name: str, parameter: str | None, words: str) -> None:
    animal = BY_NAME[name]
    report = linnet.preflight(animal.factory(), animal.make_batch(), output=animal.output)
    assert report.ok
    assert any(words in p.treatment for p in report.parameters), [p.treatment for p in report.parameters]


@pytest.mark.parametrize(
    "name", ["lstm", "gru", "vit-mha", "encoder-batch-first", "bert-sdpa", "weight-norm", "checkpointed"]
)
@pytest.mark.thinned(2)
def test_networks_that_torch_cannot_differentiate_forward_as_they_are(name: str) -> None:
    """A way is found and told; recurrent weights are differentiated example by example."""
    animal = BY_NAME[name]
    report = linnet.preflight(animal.factory(), animal.make_batch(), output=animal.output)
    assert report.ok
    assert f"directional derivatives: {report.jvp}" in str(report)
    if report.jvp != "forward":
        assert any(report.jvp in finding or "per-example" in finding for finding in report.findings)
    if name in ("lstm", "gru"):
        exact = {p.name for p in report.parameters if p.exact}
        assert exact == {p.name for p in report.parameters if p.name.startswith("layer.")}


class ForwardBreaks(torch.autograd.Function):
    """A function with a backward pass and no forward-mode formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return ForwardBreaks.apply(self.net(x))


def test_a_missing_forward_mode_is_told_with_its_reason() -> None:
    report = linnet.preflight(Custom(), X)
    assert report.ok
    assert report.jvp == "double-backward"
    assert any("forward mode is missing" in f and "double-backward" in f for f in report.findings)


def test_a_budget_too_small_is_told() -> None:
    report = linnet.preflight(network(), X, memory=1000)
    assert any("memory budget" in finding for finding in report.findings)
    assert report.ok


def test_the_network_is_left_alone() -> None:
    model = network().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    linnet.preflight(model, X)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert (model[0].weight.grad == 1).all()  # type: ignore[index]


# --- bad input ---------------------------------------------------------------------------------------
