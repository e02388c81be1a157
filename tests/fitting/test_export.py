"""Fits as plain modules, and merged into networks: the same answers, by torch alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.fitting import Sketch
from linnet.fitting.export import _off
from linnet.tangent.batch import take
from linnet.tangent.functional import call_arguments
from linnet.tangent.graph import FreeSize, resized
from linnet.tree import tensors_in
from tests import zoo
from tests.hangs import HANGS

N, D, C = 12, 4, 3
# A process that does not know linnet reads a module in both forms that torch has.
LOAD = """
import sys, torch
x, expected = torch.load(sys.argv[3])
for module in (torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2], weights_only=False)):
    torch.testing.assert_close(module(x), expected)
assert "linnet" not in sys.modules
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C))


def data(n: int = N) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fitted(params: Any = None, net: nn.Module | None = None, **options: Any) -> Any:
    return linnet.fit(linnet.linearize(net or network(), params=params), data(), **options)


@pytest.mark.parametrize("options", [{}, {"solver": Sketch(16)}, {"loss": "cross-entropy", "ridge": 0.1}])
@pytest.mark.thinned(2)
def test_the_module_is_the_linear_model(options: dict[str, Any]) -> None:
    fit = fitted(**options)
    module, x = fit.export(), data(30)[0]
    for part in (x, x[:1]):
        torch.testing.assert_close(module(part), fit.predict(part))
    assert not any(p.requires_grad for p in module.parameters())
    assert not module.eval().training


@pytest.mark.parametrize("options", [{}, {"loss": "cross-entropy", "ridge": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.thinned(2)
def test_the_variance_of_a_last_layer_is_exact(options: dict[str, Any], dtype: torch.dtype) -> None:
    (x, y), net = data(), network().to(dtype)
    fit = linnet.fit(linnet.linearize(net, params="last-layer"), (x.to(dtype), y), **options)
    new = data(30)[0].to(dtype)
    mean, variance = fit.export(variance=True)(new)
    torch.testing.assert_close(mean, fit.predict(new))
    torch.testing.assert_close(variance, fit.predictive(new).variance)


@pytest.mark.parametrize("variance", [False, True])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_a_fit_that_went_to_float64_takes_both_types(variance: bool) -> None:
    fit = fitted(ridge=1e-9)
    assert fit.record.reasons["precision"].startswith("float64")
    module, x = fit.export(variance=variance), data(30)[0]
    for given in (x, x.double()):
        found = module(given)
        torch.testing.assert_close(found[0] if variance else found, fit.predict(given))


def test_the_variance_where_the_bias_alone_moves() -> None:
    x = data(30)[0]
    fit = fitted(["2.bias"])
    torch.testing.assert_close(fit.export(variance=True)(x)[1], fit.predictive(x).variance)


@pytest.mark.long
def test_torch_saves_and_compiles_the_module(tmp_path: Path) -> None:
    fit, (x, _) = fitted(), data(7)
    module, expected = fit.export(), fit.predict(x)
    exported = torch.export.export(module, (x,), dynamic_shapes=module.meta["dynamic_shapes"])
    torch.export.save(exported, tmp_path / "module.pt2")
    torch.save(module, tmp_path / "module.pt")
    torch.save((x[:5], expected[:5]), tmp_path / "data.pt")
    files = [str(tmp_path / name) for name in ("module.pt2", "module.pt", "data.pt")]
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", LOAD, *files], check=True, timeout=HANGS)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the packages that write the file
@pytest.mark.parametrize(
    ("name", "varied", "size"),
    [
        ("resnet-batchnorm", (2, 3), 9), ("vit-mha", (2, 3), 9), ("bert-sdpa", (1,), 7),
        ("lora", (), 0), ("lstm", (), 0),
    ],
)  # fmt: skip
def test_another_runtime_gives_the_same(
    name: str, varied: tuple[int, ...], size: int, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    animal = zoo.BY_NAME[name]
    x = zoo.cast(animal.make_batch(), torch.float32)  # runtimes have few operations in float64
    lin = linnet.linearize(animal.factory().float(), output=animal.output)
    fit = linnet.fit(lin, (x, torch.arange(zoo.size(x)) % animal.classes), ridge=1.0)
    args, kwargs = call_arguments(x)
    module = fit.export()
    torch.onnx.export(
        module, args, tmp_path / "m.onnx", kwargs=kwargs or None, dynamo=True, verbose=False,
        dynamic_shapes=module.meta["dynamic_shapes"],
    )  # fmt: skip
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    other = take(x, slice(0, 3))
    for dimension in varied:
        free = FreeSize(tuple((i, dimension) for i in range(len(tensors_in(x)))), 0, 1, 9)
        other = resized(other, free, size)
    inputs = dict(zip((i.name for i in session.get_inputs()), tensors_in(other), strict=True))
    (found,) = session.run(None, {key: t.numpy() for key, t in inputs.items()})
    torch.testing.assert_close(torch.from_numpy(found), fit.predict(other), rtol=1e-4, atol=1e-4)


class Pair(nn.Module):
    """A network of two inputs by name, that returns a part by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, 6), nn.Linear(2, 6), nn.Linear(6, C)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.relu(self.a(a) * self.b(b)))}


@pytest.mark.long
def test_inputs_keep_their_names() -> None:
    torch.manual_seed(2)
    x, y = data()
    given = {"a": x, "b": x[:, :2]}
    fit = linnet.fit(linnet.linearize(Pair()), (given, y))
    torch.testing.assert_close(
        fit.export()(**take(given, slice(0, 5))), fit.predict(take(given, slice(0, 5)))
    )


@pytest.mark.long
def test_inputs_may_have_any_strides() -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, C))
    x = torch.randn(N, 2, 4, 4, generator=torch.Generator().manual_seed(5))
    fit = linnet.fit(linnet.linearize(net), (x, torch.arange(N) % C))
    torch.testing.assert_close(fit.export()(x.to(memory_format=torch.channels_last)), fit.predict(x))


IMAGES = torch.randn(N, 2, 8, 6, generator=torch.Generator().manual_seed(6))


class Images(nn.Module):
    """A network of images, with a function between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv, self.between, self.head = nn.Conv2d(2, 3, 3), between, nn.Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(torch.tanh(self.conv(x))).flatten(1))


def of_images(between: Callable[[Tensor], Tensor], width: int = 3, params: Any = None, **options: Any) -> Any:
    lin = linnet.linearize(Images(between, width), params=params)
    return linnet.fit(lin, (IMAGES, torch.arange(N) % C), ridge=0.1, **options)


@pytest.mark.long
@pytest.mark.parametrize("params", [None, "last-layer"])
def test_images_of_other_sizes(params: Any) -> None:
    fit = of_images(nn.AdaptiveAvgPool2d((2, 2)), 12, params)
    module = fit.export(variance=params is not None)
    for height, width in ((8, 6), (5, 11)):
        x = torch.randn(2, 2, height, width, generator=torch.Generator().manual_seed(height))
        mean, variance = (module(x), None) if params is None else module(x)
        torch.testing.assert_close(mean, fit.predict(x))
        if variance is not None:
            torch.testing.assert_close(variance, fit.predictive(x).variance)


@pytest.mark.long
def test_sizes_that_the_network_or_its_graph_fixes_stay() -> None:
    flat = of_images(nn.Identity(), 72).export()  # 3 · 6 · 4 numbers of the last layer
    assert list(flat.meta["dynamic_shapes"]["x"]) == [0]
    with pytest.raises(RuntimeError, match="dimension"):
        flat(torch.ones(2, 2, 9, 6))
    even = of_images(lambda h: (h if h.shape[2] % 2 else 2 * h).mean((2, 3))).export()
    assert list(even.meta["dynamic_shapes"]["x"]) == [0, 3]


class Branch(nn.Module):
    """A network that looks at the numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(D, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(torch.tanh(h) if float(h.detach().abs().max()) < 1e6 else h)


class Secret(nn.Module):
    """A network with a derivative of its own, which no graph shows."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent.clone()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(D, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.Round.apply(3 * self.layer(x)) / 3))


@pytest.mark.long
def test_sizes_stay_where_no_others_are_asked_for() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    x, y = torch.randn(10, 1, 6, 6), torch.arange(10) % 2
    fit = linnet.adapt(net, (x, y))
    module = fit.export(other_sizes=False)
    assert list(module.meta["dynamic_shapes"]["input"]) == [0]  # as nn.Sequential calls it
    assert list(fit.export().meta["dynamic_shapes"]["input"]) == [0, 2, 3]
    torch.testing.assert_close(module(x[:3]), fit.predict(x[:3]))
    with pytest.raises(linnet.errors.InputError, match="other_sizes"):
        fit.export(other_sizes=1)  # type: ignore[arg-type]


def test_networks_that_cannot_be_traced_are_refused() -> None:
    torch.manual_seed(3)
    with pytest.raises(ModelError, match=r"torch\.export"):
        fitted(net=Branch()).export()
    with pytest.raises(ModelError, match="network"):
        fitted(net=Secret()).export()


def test_the_merged_network_is_at_the_solution() -> None:
    fit, (x, _) = fitted(ridge=10.0), data(40)
    merged = fit.merge(x)
    expected = {name: t + fit.delta[name] for name, t in fit.module.theta0.items()}
    torch.testing.assert_close(dict(merged.network.named_parameters()), expected)
    assert merged.gap == pytest.approx(fit.module.gap(x), rel=1e-4)
    same = merged.network(x).argmax(1) == fit.predict(x).argmax(1)
    assert merged.agreement == pytest.approx(float(same.double().mean()))
    assert merged.examples == 40
    assert str(merged).startswith("linearity gap 0.")


def test_the_merged_network_has_its_own_type_where_the_fit_has_not() -> None:
    fit, (x, _) = fitted(ridge=1e-9), data(20)
    assert fit.module.function.dtype == torch.float64  # float32 cannot answer this ridge
    assert fit.merge(x).network(x).dtype == torch.float32


def test_the_gap_is_of_all_batches_together() -> None:
    fit, (x, _) = fitted(ridge=10.0), data(300)
    assert fit.merge(x).gap == pytest.approx(fit.module.gap(x), rel=1e-4)


def test_a_sketch_merges_into_the_network_itself() -> None:
    fit, (x, _) = fitted(solver=Sketch(16), ridge=10.0), data(20)
    merged = fit.merge(x)
    assert [*dict(merged.network.named_parameters())] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert merged.gap == pytest.approx(fit.module.gap(x), rel=1e-4)


def test_values_have_no_class() -> None:
    (x, y), net = data(), network()
    fit = linnet.fit(linnet.linearize(net, params="last-layer"), (x, nn.functional.one_hot(y, C).float()))
    merged = fit.merge()
    assert merged.agreement is None
    assert merged.gap < 1e-5


class Shifted(nn.Module):
    """Numbers, off by some."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@pytest.mark.parametrize(("by", "least", "wrong"), [(1e-5, 2.0, False), (1e-2, 2.0, True), (1e-5, 0.0, True)])
def test_an_output_near_zero_is_as_exact_as_others(by: float, least: float, wrong: bool) -> None:
    x = torch.full((1, 1), 1e-2)
    assert bool(_off(Shifted(by), x, [x], least)) is wrong
