"""Certificates of forgetting of every kind of fit, and the check of their files without linnet."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.audit import forgetting_certificate
from linnet.audit.verify_certificate import fingerprint
from linnet.errors import InputError, LinnetError
from linnet.fitting import CG

N, GONE = 14, [1, 5, 6]
FINE = CG(tolerance=1e-11)
NETWORK = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
def single():
    return make().float()
def other():
    net = make()
    with torch.no_grad():
        net[0].bias[0] += 1e-3
    return net
def words():
    torch.manual_seed(0)
    layers = torch.nn.Embedding(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5)
    return torch.nn.Sequential(*layers).double()
"""


def network(name: str) -> Any:
    space: dict[str, Any] = {}
    exec(NETWORK, space)
    return space[name]()


def values() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=draw, dtype=torch.float64)
    return x, torch.arange(N) % 2


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, (N, 5), generator=torch.Generator().manual_seed(2))
    y = ids[:, 1:].clone()
    y[:, 0] = -100
    return ids[:, :-1], y


def made(kind: str) -> tuple[Any, tuple[Tensor, Tensor]]:
    x, y = values()
    if kind == "positions":
        lin = linnet.linearize(network("words"), params="0.weight")
        return linnet.fit(lin, texts(), "cross-entropy", ridge=0.1, axis=-1, solver=FINE), texts()
    lin = linnet.linearize(network("make"))
    if kind == "values":
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)
    if kind == "probabilities":
        y = torch.rand(N, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        y = y / y.sum(1, keepdim=True)
    loss = "cross-entropy" if kind in ("cross-entropy", "probabilities") else "squared"
    return linnet.fit(lin, (x, y), loss, ridge=0.1), (x, y)


KINDS = ("classes", "values", "cross-entropy", "probabilities", "positions")


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_is_certified_and_what_did_not_forget_is_not(kind: str) -> None:
    fit, _ = made(kind)
    found = forgetting_certificate(fit, GONE)
    assert found.relative < 1e-8
    assert (found.retained, found.forgotten, found.warnings) == (N - 3, 3, ())
    (told,) = forgetting_certificate(fit, []).warnings
    assert "no example was forgotten" in told
    less = fit.forget(GONE)
    for name, value in less.module.delta.items():
        with torch.no_grad():
            value.copy_(fit.delta[name])
    off = torch.cat([(fit.delta[k] - v).flatten() for k, v in fit.forget(GONE).delta.items()])
    assert forgetting_certificate(fit, less).distance >= float(off.norm())


def test_the_bound_of_nested_fits_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = linnet.adapt(network("make"), values(), ridge=0.1)
    less = fit.forget(GONE)
    assert forgetting_certificate(fit, less).relative < 1e-9
    off = 1e-3 * torch.randn(N - 3, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    kernel, beta = less.system.dual.kernel, less.system.beta
    monkeypatch.setattr(type(less.system), "beta", beta + off)
    distance = float((off * (kernel @ off)).sum().sqrt())
    wrong = (kernel + less.ridge * torch.eye(N - 3, dtype=torch.float64)) @ off
    found = forgetting_certificate(fit, less)
    assert found.distance >= distance
    assert found.gradient == pytest.approx(float((wrong * (kernel @ wrong)).sum().sqrt()), rel=1e-6)


def test_trained_weights_are_said_to_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = linnet.adapt(network("make"), values(), ridge=0.1)
    [told] = forgetting_certificate(fit, [0]).warnings
    assert "are those of all examples" in told
    monkeypatch.setattr(type(fit), "trained", True)
    assert "were trained on the forgotten" in forgetting_certificate(fit, [0]).warnings[0]


def check(
    folder: Path, data: Any, make: str = "make", apart: bool = False, more: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    """The exit status and the words of the script, here or in a process of its own."""
    x, y = data
    np.savez(folder / "rest.npz", x=x.numpy(), y=y.numpy())
    (folder / "net.py").write_text(NETWORK)
    script = folder / "verify_certificate.py"
    assert "import linnet" not in script.read_text()
    assert "from linnet" not in script.read_text()
    words = [str(script), str(folder / "certificate.json"), "--model"]
    words += [f"{folder / 'net.py'}:{make}", "--data", str(folder / "rest.npz"), *more]
    if apart:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)
    said = io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(said):
        code = int(runpy.run_path(str(script))["main"]())
    return code, json.loads(said.getvalue())


def without(data: tuple[Tensor, Tensor], gone: list[int]) -> tuple[Tensor, Tensor]:
    keep = torch.tensor([i for i in range(len(data[0])) if i not in gone]).flip(0)  # in any order
    return data[0][keep], data[1][keep]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_others_can_check_it_without_linnet(kind: str, tmp_path: Path) -> None:
    fit, data = made(kind)
    found = forgetting_certificate(fit, GONE, tmp_path)
    make = "words" if kind == "positions" else "make"
    code, said = check(tmp_path, without(data, GONE), make, apart=kind == "classes")
    assert code == 0, said
    assert said["network"]
    assert said["displacement"]
    assert said["examples"]
    assert said["relative"] < 1e-6
    assert said["distance to a fit that never saw them, at most"] == pytest.approx(found.distance, abs=1e-6)


def test_what_is_not_so_is_found(tmp_path: Path) -> None:
    fit, data = made("classes")
    forgetting_certificate(fit, GONE, tmp_path)
    code, said = check(tmp_path, without(data, GONE[1:]))  # a forgotten one is among the data
    assert code == 1
    assert not said["examples"]
    assert said["forgotten examples among the data"] == 1
    code, said = check(tmp_path, without(data, GONE), "other")
    assert code == 1
    assert not said["network"]
    # the displacement of the fit before, under a certificate that names it
    weights = {name: value.numpy() for name, value in fit.delta.items()}
    np.savez(tmp_path / "displacement.npz", **weights)
    assert not check(tmp_path, without(data, GONE))[1]["displacement"]
    about = json.loads((tmp_path / "certificate.json").read_text())
    assert about["linnet"] == linnet.__version__
    assert len(about["forgotten positions"]) == len(about["forgotten"])
    about["displacement"] = fingerprint(weights)
    (tmp_path / "certificate.json").write_text(json.dumps(about))
    code, said = check(tmp_path, without(data, GONE))
    assert code == 1
    assert said["displacement"]
    assert said["relative"] > 0.01
    # of a ridge that makes every distance small
    (tmp_path / "certificate.json").write_text(json.dumps(about | {"ridge": -1.0}))
    with pytest.raises(SystemExit, match="ridge is -1"):
        check(tmp_path, without(data, GONE))
    nothing = {name: np.zeros_like(value) for name, value in weights.items()}
    np.savez(tmp_path / "displacement.npz", **nothing)
    (tmp_path / "certificate.json").write_text(json.dumps(about | {"displacement": fingerprint(nothing)}))
    code, said = check(tmp_path, without(data, GONE))
    assert code == 1
    assert said["relative"] == float("inf")


def test_who_was_forgotten_can_be_asked(tmp_path: Path) -> None:
    fit, (x, y) = made("classes")
    forgetting_certificate(fit, GONE, tmp_path)
    mine, rest = tmp_path / "mine.npz", without((x, y), GONE)
    for rows, named in ((GONE, True), (GONE[:1], True), ([*GONE, 0], False)):
        np.savez(mine, x=x[rows].numpy(), y=y[rows].numpy())
        code, said = check(tmp_path, rest, more=("--forgotten", str(mine)))
        assert (said["named"], code) == (named, int(not named))
        assert said["retained and forgotten"] == [N - 3, 3]


def test_examples_of_double_precision_are_told_apart_beyond_single(tmp_path: Path) -> None:
    fit, data = made("classes")
    forgetting_certificate(fit, GONE, tmp_path)
    x, y = without(data, GONE)
    x[0, 0] += 1e-10
    assert not check(tmp_path, (x, y))[1]["examples"]


def test_a_certificate_that_lacks_something_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, data = made("classes")
    with pytest.raises(InputError, match="has forgotten nothing"):
        forgetting_certificate(fit, fit, tmp_path)
    forgetting_certificate(fit, GONE, tmp_path)
    about = json.loads((tmp_path / "certificate.json").read_text())
    for key in ("ridge", "forgotten", "network"):
        left = {name: value for name, value in about.items() if name != key}
        (tmp_path / "certificate.json").write_text(json.dumps(left))
        with pytest.raises(SystemExit):
            check(tmp_path, without(data, GONE))
        assert f"has no '{key}'" in capsys.readouterr().err
    (tmp_path / "certificate.json").write_text(json.dumps(about))
    for arrays in ({"x": np.zeros((0, 3)), "y": np.zeros(0, np.int64)}, {"x": np.zeros((2, 3))}):
        np.savez(tmp_path / "mine.npz", **arrays)
        with pytest.raises(SystemExit):
            check(tmp_path, without(data, GONE), more=("--forgotten", str(tmp_path / "mine.npz")))
        assert "has no examples" in capsys.readouterr().err
    (tmp_path / "certificate.json").write_text("[]")
    with pytest.raises(SystemExit):
        check(tmp_path, without(data, GONE))


def test_files_are_for_weights_of_the_network_alone(tmp_path: Path) -> None:
    net, data = network("make"), values()
    with pytest.raises(InputError, match="leave folder= out"):
        forgetting_certificate(linnet.adapt(net, data, ridge=0.1), [0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_types_of_numbers_are_no_other_network(tmp_path: Path) -> None:
    x, y = values()
    fit = linnet.fit(linnet.linearize(network("single")), (x.float(), y), ridge=1e-6)
    forgetting_certificate(fit, GONE, tmp_path)  # made in float64, as the ridge asks for
    code, said = check(tmp_path, without((x, y), GONE), "single")
    assert said["network"]
    assert said["examples"]
    assert code == 0


def test_places_and_inputs_that_cannot_be_are_refused_in_words(tmp_path: Path) -> None:
    fit, _ = made("classes")
    (tmp_path / "file").write_text("here")
    with pytest.raises(LinnetError, match="file"):
        forgetting_certificate(fit, GONE, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "here"

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network("make")

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.inside(torch.cat([a, b], 1))

    x, y = values()
    pair = linnet.fit(linnet.linearize(Two()), ((x[:, :1], x[:, 1:]), y))
    with pytest.raises(InputError, match="whose x is a tuple"):
        forgetting_certificate(pair, GONE, tmp_path / "folder")
    named = linnet.fit(linnet.linearize(Two()), ({"a": x[:, :1], "b": x[:, 1:]}, y))
    forgetting_certificate(named, GONE, tmp_path / "folder")
    assert len(list((tmp_path / "folder").iterdir())) == 3


def test_copies_that_stay_are_said(tmp_path: Path) -> None:
    x, y = values()
    at = next(place for place in range(N) if place not in GONE)
    x[at] = x[GONE[0]]
    y[at] = y[GONE[0]]
    fit = linnet.fit(linnet.linearize(network("make")), (x, y), "cross-entropy", ridge=0.1)
    found = forgetting_certificate(fit, GONE, tmp_path)
    assert "1 of the examples that stay have the same inputs" in found.warnings[0]
    code, said = check(tmp_path, without((x, y), GONE))
    assert code == 0
    assert said["copies of forgotten examples that were kept"] == 1


def test_data_are_taken_in_the_forms_that_a_fit_takes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randint(0, 5, (N, 3), generator=draw), torch.arange(N) % 2
    hot = nn.functional.one_hot(y, 2).float()
    for given in (y, hot):
        fit = linnet.fit(linnet.linearize(network("make")), (x, given), "cross-entropy", ridge=1.0)
        forgetting_certificate(fit, GONE, tmp_path)
        for form in (y, hot):
            code, said = check(tmp_path, without((x, form), GONE))
            assert code == 0, said
