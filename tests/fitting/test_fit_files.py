"""Saving and loading: nothing is lost, and nothing but the very same fit is ever loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import FileFormatError, InputError
from linnet.files import save
from linnet.fitting import CG, Nystrom, OneHot
from tests.fitting.problems import flat, near, network, problem
from tests.refusals import refused
from tests.zoo import BY_NAME

P = problem(tests=2)


def saved(folder: Path, **options: Any) -> Any:
    """A fit and the file it was saved to."""
    fit = P.fit(ridge=0.3, **options)
    return fit, fit.save(folder)


def check_same(fit: Any, loaded: Any, x_test: Any, relative: float = 1e-12) -> None:
    """Everything that a fit can be asked has the same answer."""
    near(flat(loaded.delta), flat(fit.delta), relative)
    near(loaded.predict(x_test), fit.predict(x_test), relative)
    near(loaded.predictive(x_test).covariance, fit.predictive(x_test).covariance, relative)
    near(loaded.loo(), fit.loo(), relative)
    near(loaded.influence(x_test), fit.influence(x_test), relative)
    near(loaded.informativeness(), fit.informativeness(), relative)
    near(loaded.targets, fit.targets, 0.0)
    assert (loaded.ridge, loaded.classes, loaded.solver, loaded.n) == (
        fit.ridge,
        fit.classes,
        fit.solver,
        fit.n,
    )
    assert loaded.noise == pytest.approx(fit.noise, rel=1e-9)
    if fit.classes is not None:
        assert torch.equal(loaded.labels, fit.labels)
        assert loaded.temperature == pytest.approx(fit.temperature, rel=1e-6)


def test_what_was_chosen_and_why_is_kept(tmp_path: Path) -> None:
    head = linnet.with_head(network(), 2, data=(P.x, P.y.clamp(max=1)))
    fit = linnet.fit(linnet.linearize(head), (P.x, P.y.clamp(max=1)), ridge="loo", targets=OneHot(4.0))
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, head)
    before, after = (json.dumps({**f.summary(), "certificate": None}) for f in (fit, loaded))
    assert before == after
    assert len(fit.summary()["warnings"]) == 1
    near(loaded.update((P.x[:1], torch.tensor([1]))).targets[-1], torch.tensor([0.0, 4.0]), 0.0)


def test_settings_of_the_iteration_are_kept(tmp_path: Path) -> None:
    fit, path = saved(tmp_path, solver=CG(1e-9, 77, Nystrom(3)))
    assert linnet.load_fit(path, P.model).system.settings == fit.system.settings
    assert fit.system.settings.max_steps == 77


@pytest.mark.filterwarnings("ignore:.*have the inputs of others")
@pytest.mark.parametrize(
    "name", ["two-inputs", "bert-eager", "tied-linears", "tied-embedding", "dict-output", "lora"]
)
@pytest.mark.thinned(2)
def test_networks_of_the_zoo(name: str, tmp_path: Path) -> None:
    """Tuple and dict inputs, tied weights, adapters of the output, frozen parameters."""
    animal = BY_NAME[name]
    model, x, x_test = animal.factory(), animal.make_batch(5), animal.make_batch(2, seed=1)
    lin = linnet.linearize(model, output=animal.output)
    fit = linnet.fit(lin, (x, torch.tensor([0, 1, 0, 1, 2])), ridge=0.3, solver="dual")
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, animal.factory(), output=animal.output)
    check_same(fit, loaded, x_test)
    assert type(loaded.x) is type(fit.x)


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.net(x), "other": x}


def test_an_adapter_by_name_is_kept_and_a_callable_one_asked_for(tmp_path: Path) -> None:
    fit = linnet.fit(linnet.linearize(Named(), output="scores"), (P.x, P.y))
    fit.save(tmp_path / "name")
    check_same(fit, linnet.load_fit(tmp_path / "name", Named()), P.x_test)
    fit = linnet.fit(linnet.linearize(Named(), output=lambda r: 2 * r["scores"]), (P.x, P.y))
    fit.save(tmp_path / "call")
    refused(
        InputError,
        lambda: linnet.load_fit(tmp_path / "call", Named()),
        "output",
        "callable",
        "linnet.linearize",
    )
    check_same(fit, linnet.load_fit(tmp_path / "call", Named(), output=lambda r: 2 * r["scores"]), P.x_test)
    refused(
        FileFormatError,
        lambda: linnet.load_fit(tmp_path / "call", Named(), output=lambda r: r["scores"]),
        "outputs",
    )


# --- what must not be loaded -------------------------------------------------------------------------


def test_other_weights(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1e-9  # type: ignore[index]
    refused(
        FileFormatError, lambda: linnet.load_fit(path, other), str(path), "weights differ", "same checkpoint"
    )
    refused(FileFormatError, lambda: linnet.load_fit(path, network(hidden=6)), "weights differ")
    refused(FileFormatError, lambda: linnet.load_fit(path, network().float()), "weights differ")
    wrapped = nn.Sequential(nn.Sequential(network()))
    refused(FileFormatError, lambda: linnet.load_fit(path, wrapped), "it lacks '0.weight'")


def test_equal_weights_of_another_network(tmp_path: Path) -> None:
    """The same parameters under another activation give other outputs: the fit is not theirs."""
    _, path = saved(tmp_path)
    other = nn.Sequential(network()[0], nn.ReLU(), network()[2])  # type: ignore[index]
    refused(FileFormatError, lambda: linnet.load_fit(path, other), "another network", "outputs")
    unfit = nn.Linear(7, 2).double()
    refused(FileFormatError, lambda: linnet.load_fit(path, network(), output=unfit), "cannot run", "output=")


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated(solver: str, share: float, tmp_path: Path) -> None:
    _, path = saved(tmp_path, solver=solver)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(FileFormatError, lambda: linnet.load_fit(path, P.model), str(path))


def test_any_flipped_bit(tmp_path: Path) -> None:
    """Header, record and every tensor are under the checksum."""
    _, path = saved(tmp_path)
    content = path.read_bytes()
    places = [9, 30, 200, 900, *range(1500, len(content), 997), len(content) - 1]
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1
        path.write_bytes(bytes(altered))
        with pytest.raises(FileFormatError, match=r"truncated|altered|was not|format|kind"):
            linnet.load_fit(path, P.model)
    assert len(places) > 8


def test_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "linear-fit.safetensors"
    save_file({"x": torch.ones(2)}, str(path))
    refused(FileFormatError, lambda: linnet.load_fit(path, P.model), "linnet")
    path.write_bytes(b"PK\x03\x04 not a tensor in sight")
    refused(FileFormatError, lambda: linnet.load_fit(tmp_path, P.model), str(path))
    torch.save(P.model.state_dict(), path)
    refused(FileFormatError, lambda: linnet.load_fit(path, P.model), str(path))
    other = save(tmp_path, "posterior", {"x": torch.ones(2)})
    with pytest.raises(FileFormatError, match=r"posterior.*linear-fit"):
        linnet.load_fit(other, P.model)


@pytest.mark.parametrize("name", ["nothing", "nothing/here.safetensors"])
def test_a_missing_file(name: str, tmp_path: Path) -> None:
    refused(
        InputError,
        lambda: linnet.load_fit(tmp_path / name, P.model),
        "nothing",
        "existing file",
        "check the path",
    )


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    fit, path = saved(tmp_path)
    before = path.read_bytes()

    def breaks(tensors: Any, filename: str, metadata: Any) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", breaks)
    with pytest.raises(InputError, match="space"):
        fit.forget([0]).save(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
