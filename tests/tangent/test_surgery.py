"""Surgery: every rectifier of any network leaks, and nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import linnet
from linnet.errors import InputError, ModelError
from linnet.tangent.modes import differentiable_kernels
from linnet.tangent.surgery import RELU, CappedLeakyReLU, SurgeryReport, leaky_relu, report
from tests.refusals import refused
from tests.zoo import BY_NAME, ZOO, assert_near, outputs

SLOPE = 0.3


class Rectifiers(TorchFunctionMode):
    """The oracle: counts rectifiers that are called, and can replace them by plain arithmetic."""

    def __init__(self, slope: float | None = None) -> None:
        super().__init__()
        self.slope, self.count = slope, 0

    def __torch_function__(self, func, kinds, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        capped = func in (F.relu6, F.hardtanh) and self._cap(func, kwargs or {})
        if func in RELU or capped:
            self.count += 1
            if self.slope is not None:
                x = args[0]
                y = torch.where(x > 0, x, self.slope * x)
                y = y.clamp(max=6) if capped else y
                in_place = (
                    func.__name__ == "relu_" or (kwargs or {}).get("inplace") or (len(args) > 1 and args[1])
                )
                return x.copy_(y) if in_place else y
        return func(*args, **(kwargs or {}))

    def _cap(self, func: object, kwargs: dict[str, object]) -> bool:
        """Whether this is ReLU6, which torch's own module spells hardtanh(x, 0, 6)."""
        return func is F.relu6 or (kwargs.get("min_val"), kwargs.get("max_val")) == (0.0, 6.0)


class Calls(nn.Module):
    """One rectifying call between two layers."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.call, self.last = nn.Linear(3, 6), call, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.first(x)))


def in_place(function: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A call whose result is thrown away: what it does to its input is what counts."""

    def call(x: Tensor) -> Tensor:
        x = x + 0
        function(x)
        return x

    return call


def expected(x: Tensor, cap: float | None = None) -> Tensor:
    y = torch.where(x > 0, x, SLOPE * x)
    return y if cap is None else y.clamp(max=cap)


SPELLINGS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "F.relu": (F.relu, None),
    "F.relu keyword": (lambda x: F.relu(input=x, inplace=False), None),
    "F.relu in place": (in_place(lambda x: F.relu(x, inplace=True)), None),
    "F.relu_": (in_place(F.relu_), None),
    "torch.relu": (torch.relu, None),
    "torch.relu_": (in_place(torch.relu_), None),
    "Tensor.relu": (lambda x: x.relu(), None),
    "Tensor.relu_": (in_place(lambda x: x.relu_()), None),
    "nn.ReLU": (nn.ReLU(), None),
    "nn.ReLU in place": (in_place(nn.ReLU(inplace=True)), None),
    "F.relu6": (F.relu6, 6.0),
    "F.relu6 in place": (in_place(lambda x: F.relu6(x, inplace=True)), 6.0),
    "nn.ReLU6": (nn.ReLU6(), 6.0),
    "hardtanh": (lambda x: F.hardtanh(x, 0.0, 0.5), 0.5),
    "hardtanh_": (in_place(lambda x: F.hardtanh_(x, min_val=0.0, max_val=0.5)), 0.5),
    "nn.Hardtanh": (nn.Hardtanh(0.0, 0.5), 0.5),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), None),
    "nn.Threshold": (nn.Threshold(0.0, 0.0), None),
}
CLAMPS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "clamp": (lambda x: x.clamp(min=0), None),
    "clamp positional": (lambda x: torch.clamp(x, 0.0), None),
    "clamp_": (in_place(lambda x: x.clamp_(min=0)), None),
    "clip": (lambda x: torch.clip(x, min=0, max=0.5), 0.5),
    "clamp_min": (lambda x: x.clamp_min(0), None),
    "clamp_min_": (in_place(lambda x: torch.clamp_min_(x, 0)), None),
}


@pytest.mark.parametrize("spelling", [*SPELLINGS, *CLAMPS])
@pytest.mark.thinned(3)
def test_every_spelling_leaks(spelling: str, float64: torch.dtype) -> None:
    call, cap = {**SPELLINGS, **CLAMPS}[spelling]
    model = Calls(call)
    x = 2 * torch.randn(9, 3)
    leaky = leaky_relu(model, SLOPE, x, clamps=spelling in CLAMPS)
    assert_near(leaky(x), model.last(expected(model.first(x), cap)))
    found = report(leaky)
    assert len(found.replaced) == 1
    assert not found.left
    # forward mode, and reverse mode through it
    lin = linnet.linearize(leaky)
    v = {name: torch.randn_like(p) for name, p in lin.delta.items()}
    step = 1e-6
    moved = [
        torch.func.functional_call(leaky, {n: p + s * v[n] for n, p in leaky.named_parameters()}, (x,))
        for s in (step, -step)
    ]
    assert_near(lin.jvp(x, v), ((moved[0] - moved[1]) / (2 * step)).detach(), 1e-6)
    lin(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in lin.parameters())


@pytest.mark.parametrize("spelling", CLAMPS)
def test_clamps_stay_unless_asked_for(spelling: str) -> None:
    model, x = Calls(CLAMPS[spelling][0]), torch.randn(5, 3)
    leaky = leaky_relu(model, SLOPE, x)
    torch.testing.assert_close(leaky(x), model(x))
    (left,) = report(leaky).left
    assert "clamps=True" in left.by


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.clamp(min=-1),
        lambda x: x.clamp(max=0),
        lambda x: x.clamp(min=torch.zeros(())),
        lambda x: F.threshold(x, 0.1, 0.0),
        F.hardtanh,
        F.leaky_relu,
        F.gelu,
        F.elu,
    ],
)
def test_other_activations_stay(call: Callable[[Tensor], Tensor]) -> None:
    model, x = Calls(call), torch.randn(5, 3)
    leaky = leaky_relu(model, SLOPE, x, clamps=True)
    torch.testing.assert_close(leaky(x), model(x))
    assert not report(leaky).replaced


@pytest.mark.parametrize("animal", ZOO, ids=str)
@pytest.mark.thinned(3)
def test_any_network_leaks_everywhere_and_changes_nowhere_else(animal) -> None:  # type: ignore[no-untyped-def]
    model, x = animal.factory().eval(), animal.make_batch(3)
    before = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    leaky = leaky_relu(model, SLOPE, x, output=animal.output)
    with differentiable_kernels(False), Rectifiers(SLOPE) as oracle:
        wanted = outputs(animal, model, x)
    assert_near(outputs(animal, leaky, x), wanted.detach(), 1e-9)
    with Rectifiers() as after:
        outputs(animal, leaky, x)
    assert after.count == 0
    assert bool(report(leaky).replaced) == (oracle.count > 0)
    assert [n for n, _ in leaky.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert type(leaky).__name__ == type(model).__name__
    now = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    assert all(torch.equal(t, now[name]) for name, t in before.items())
    with differentiable_kernels(False), Rectifiers() as untouched:
        outputs(animal, model, x)
    assert untouched.count == oracle.count


@pytest.mark.parametrize("name", ["lenet", "resnet-batchnorm", "mobilenet", "inplace-relu", "densenet"])
@pytest.mark.thinned(2)
def test_linear_models_and_kernels_see_the_leak(name: str) -> None:
    animal = BY_NAME[name]
    model, x = animal.factory(), animal.make_batch(4)
    leaky = leaky_relu(model, SLOPE)
    lin = linnet.linearize(leaky)
    j = lin.jacobian(x).flatten(0, 1)
    assert_near(lin.kernel(x).reshape(len(j), -1), j @ j.T, 1e-8)
    v = torch.randn(j.shape[1], dtype=torch.float64)
    assert_near(lin.jvp(x, v).flatten(), j @ v, 1e-8)
    dead = (linnet.linearize(model).jacobian(x).abs().amax((0, 1)) == 0).sum()
    assert (j.abs().amax(0) == 0).sum() <= dead


class Sharing(nn.Module):
    """One module in two places, a helper outside of any module, a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.again = nn.Sequential(nn.Linear(3, 3), self.act)
        self.out = nn.Linear(3, 2)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.again(self.act(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(rectify(self.features(x)))


def rectify(x: Tensor) -> Tensor:
    return x.relu() - 0.5


def test_shared_modules_helpers_and_other_methods() -> None:
    model, x = Sharing().double(), torch.randn(4, 3, dtype=torch.float64)
    leaky = leaky_relu(model, SLOPE, x)
    assert leaky.act is leaky.again[1]
    inner = leaky.again[0](expected(x))
    assert_near(leaky.features(x), expected(expected(inner)).detach())
    assert_near(leaky(x), leaky.out(expected(expected(expected(inner))) - 0.5).detach())
    where = {(one.where, one.what) for one in report(leaky).replaced}
    assert {("act", "ReLU"), ("again.1", "ReLU"), ("", "relu")} == where
    words = {one.what for one in report(leaky_relu(model)).replaced}
    assert "relu in features" in words  # found in the code, without an example


def test_copies_pickles_and_reports_survive() -> None:
    model, x = Sharing(), torch.randn(4, 3)
    leaky = leaky_relu(model, SLOPE, x)
    for twin in (copy.deepcopy(leaky), pickle.loads(pickle.dumps(leaky))):
        torch.testing.assert_close(twin(x), leaky(x))
        assert report(twin) == report(leaky)
    buffer = io.BytesIO()
    torch.save(leaky.state_dict(), buffer)
    fresh = leaky_relu(Sharing(), SLOPE)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(fresh(x), leaky(x))
    assert isinstance(leaky, Sharing)
    text = str(report(leaky))
    assert "slope 0.3" in text
    assert "again.1" in text
    assert report(leaky).to_dict()["replaced"][0]["where"]
    assert isinstance(report(leaky), SurgeryReport)


def test_kept_modules_stay() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), Inner(), nn.Linear(4, 4), Inner())
    x = torch.randn(6, 2)
    leaky = leaky_relu(model, SLOPE, x, keep=["1", "3"])
    h = F.relu(model[2](F.relu(model[0](x))))
    assert torch.allclose(leaky(x), expected(model[4](h)))
    assert {one.where for one in report(leaky).left} == {"1", "3"}


def test_hooks_modes_and_roots() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).train()
    seen: list[int] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    leaky = leaky_relu(model)
    leaky(torch.ones(1, 2))
    assert seen == [1]
    assert leaky.training
    assert leaky[1].training
    assert leaky_relu(nn.ReLU())(torch.tensor(-1.0)) == pytest.approx(-0.2)
    capped = leaky_relu(nn.Sequential(nn.ReLU6(inplace=True)))[0]
    assert isinstance(capped, CappedLeakyReLU)
    assert "cap=6.0" in repr(capped)


def test_training_through_checkpoints_has_the_leaky_gradient(float64: torch.dtype) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: F.relu(self.layer(t)), x, use_reentrant=False).sum(1)

    model, x = Recomputed(), torch.randn(7, 3)
    leaky = leaky_relu(model, SLOPE)
    leaky(x).sum().backward()
    h = model.layer(x).detach()
    gain = torch.where(h > 0, 1.0, SLOPE)
    assert_near(leaky.layer.weight.grad, gain.T @ x)


def test_transformer_layers_leak_with_the_fast_path_on() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()
    leaky = leaky_relu(layer, SLOPE)
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        fast = leaky(x)
    assert torch.allclose(fast, leaky(x.clone().requires_grad_()), atol=1e-6)
    assert not torch.allclose(fast, layer(x))


def test_bad_input() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for slope in (0.0, -0.1, 1.5, float("nan"), True, "0.2"):
        refused(InputError, lambda slope=slope: leaky_relu(net, slope), "slope=")
    refused(InputError, lambda: leaky_relu("net"), "net")
    refused(InputError, lambda: leaky_relu(net, keep=["7"]), "'7'")
    refused(InputError, lambda: leaky_relu(net, keep="1"), "keep=")
    refused(InputError, lambda: leaky_relu(leaky_relu(net)), "surgery before")
    refused(InputError, lambda: report(net), "no report")
    refused(ModelError, lambda: leaky_relu(net, example=torch.ones(3, 5)), "cannot run")
    rnn = nn.Sequential(nn.RNN(2, 3, nonlinearity="relu"))
    refused(ModelError, lambda: leaky_relu(rnn), "'0'", "recurrent kernel")
    assert report(leaky_relu(rnn, keep=["0"])).left[0].where == "0"
