"""``linnet.spectrum.gram``: the public door to the Gram matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import linnet
from linnet.errors import MemoryBudgetError
from tests.fitting.problems import near, problem
from tests.oracles.dense import kernel_oracle
from tests.refusals import refused

P = problem()
OUTPUTS: tuple[Literal["full", "trace", "diagonal", "sum"], ...] = ("full", "trace", "diagonal", "sum")


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_network_is_linearized_in_all_its_parameters(
    outputs: Literal["full", "trace", "diagonal", "sum"],
) -> None:
    near(linnet.spectrum.gram(P.model, P.x, form=outputs), kernel_oracle(P.j, form=outputs))
    near(linnet.spectrum.gram(P.lin, P.x_test, P.x, form=outputs), kernel_oracle(P.j_test, P.j, outputs))


def test_a_linearization_keeps_its_parameters() -> None:
    lin = linnet.linearize(P.model, params="last-layer")
    near(linnet.spectrum.gram(lin, P.x), kernel_oracle(P.j[:, :, 20:]))


def test_file_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = linnet.spectrum.gram(P.lin, P.x, file=tmp_path / "k.npy", progress=False)
    near(torch.from_numpy(np.load(tmp_path / "k.npy")), kernel_oracle(P.j))
    assert torch.equal(kept, linnet.spectrum.gram(P.lin, P.x))
    assert capsys.readouterr().err == ""


def test_accumulation_changes_the_type_of_a_float32_kernel() -> None:
    model = problem().model.float()
    x = P.x.float()
    narrow, wide = (linnet.spectrum.gram(model, x, accumulate=a) for a in ("float32", "float64"))
    assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
    near(wide, kernel_oracle(P.j), 1e-5)


def test_a_budget_too_small_says_what_to_do(tmp_path: Path) -> None:
    error = refused(
        MemoryBudgetError, lambda: linnet.spectrum.gram(P.lin, P.x, memory=2000), "2.00 kB", "7 × 7 examples"
    )
    assert "file='kernel.npy'" in str(error)
    assert 'form="trace"' in str(error)
    error = refused(
        MemoryBudgetError, lambda: linnet.spectrum.gram(P.lin, P.x, form="trace", memory=500), "500 B"
    )
    assert 'form="trace"' not in str(error)
    file = tmp_path / "k.npy"
    error = refused(
        MemoryBudgetError, lambda: linnet.spectrum.gram(P.lin, P.x, file=file, memory=500), "500 B"
    )
    assert "file=" not in str(error)
    assert list(tmp_path.iterdir()) == []
