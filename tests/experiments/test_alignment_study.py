"""Cosines between updates: exact where the approximation is, and against dense solutions elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.optimizer.alignment_study import Alignment, alignment
from linnet.errors import InputError
from linnet.likelihoods import Categorical
from tests.optim.gauss_newton_cases import classes, dense_gauss_newton, gradient_of, mlp


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


def study(structures: list[str], **options: Any) -> Alignment:
    return alignment(mlp(), classes(), Categorical(), structures, **{"tolerance": 1e-10, **options})


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_against_dense_solutions(decay: float) -> None:
    net, (x, y) = mlp(), classes()
    G, g = dense_gauss_newton(net, x), gradient_of(net, x, y, decay)
    damped = G + (0.01 + decay) * torch.eye(len(G), dtype=G.dtype)
    full = torch.linalg.solve(damped, g)
    parts = [slice(0, 30), slice(30, len(G))]
    blocks = torch.cat([torch.linalg.solve(damped[rows, rows], g[rows]) for rows in parts])
    diagonal = g / damped.diagonal()
    found = study(["full", "block", "diagonal"], weight_decay=decay, options={"expectation": "exact"})
    assert found.layers == ("0", "2")
    assert found.whole["full"] == pytest.approx(1.0, abs=1e-9)
    assert found.whole["block"] == pytest.approx(cosine(blocks, full), rel=1e-8)
    assert found.whole["block-diagonal"] == pytest.approx(cosine(blocks, full), rel=1e-8)
    assert found.whole["diagonal"] == pytest.approx(cosine(diagonal, full), rel=1e-8)
    wanted = [cosine(diagonal[rows], blocks[rows]) for rows in parts]
    assert found.by_layer["diagonal"].tolist() == pytest.approx(wanted, rel=1e-8)
    assert found.by_layer["block"].tolist() == pytest.approx([1.0, 1.0], abs=1e-9)


def test_kronecker_factors_are_exact_for_one_example() -> None:
    net, (x, y) = mlp(), classes(1)
    found = alignment(net, (x, y), Categorical(), ["kflr", "kfra"], tolerance=1e-10)
    for name in ("kflr*", "kfra*"):
        assert found.by_layer[name].tolist() == pytest.approx([1.0, 1.0], abs=1e-8)
    assert float(found.by_layer["kfra"].min()) < 0.9999


@pytest.mark.long
def test_what_is_asked_for() -> None:
    assert list(study(["kfac", "ekfac"]).whole) == ["kfac", "kfac*", "ekfac", "block-diagonal"]
    assert list(study(["kfac"], inversions=["exact"]).whole) == ["kfac*", "block-diagonal"]
    base = study(["kfac"])
    assert base.whole != study(["kfac"], damping=1.0).whole
    assert base.whole != study(["kfac"], options={"seed": 3}).whole
    assert study(["kfac"], options={"params": "last-layer"}).layers == ("2",)
    assert base.whole != study(["kfac"], options={"output": lambda f: 2 * f}).whole
    assert max(base.residuals) < 1e-9
    assert max(study(["kfac"], tolerance=0.1).residuals) > 1e-9
    assert max(study(["kfac"], options={"steps": 2}).residuals) > 1e-6
    assert "kfac*" in str(base)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"inversions": ["other"]}, "inversions"),
        ({"damping": 0.0}, "damping"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"options": {"samples": 3}}, "samples"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        study(["kfac"], **options)


def test_likelihood_and_list_of_structures() -> None:
    x, y = classes()
    with pytest.raises(InputError, match="likelihood=None"):
        alignment(mlp(), (x, y), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="structures='kfac'"):
        alignment(mlp(), (x, y), Categorical(), "kfac")
