"""The digits that come with linnet are those of their source, and need no other package."""

from __future__ import annotations

import builtins
from importlib import resources
from typing import Any

import numpy as np
import pytest

from linnet.examples import load_digits


def test_they_are_those_of_the_source() -> None:
    from sklearn.datasets import load_digits as from_scikit_learn

    images, labels = load_digits()
    source = from_scikit_learn()
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    np.testing.assert_array_equal(images, np.rint(source.images * (255 / 16)))
    np.testing.assert_array_equal(labels, source.target)


def test_no_optional_package_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        assert name.partition(".")[0] not in ("sklearn", "scipy", "PIL", "matplotlib", "pandas")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert len(load_digits()[0]) == 1797


def test_source_and_license_stand_beside_the_data() -> None:
    folder = resources.files("linnet.examples")
    notice = folder.joinpath("NOTICE.md").read_text(encoding="utf-8")
    assert "Alpaydin" in notice
    assert "CC BY 4.0" in notice
    assert len(folder.joinpath("digits.npz").read_bytes()) < 100_000
