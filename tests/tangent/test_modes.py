"""The settings of torch that derivatives need, with what each version of torch calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from linnet.tangent.modes import differentiable_kernels


class OlderBackend:
    """torch.backends.mkldnn as it is in torch 2.6, without allow_tf32."""

    def __init__(self) -> None:
        self.enabled, self.deterministic = True, True

    @contextlib.contextmanager
    def flags(self, enabled: bool = False, deterministic: bool = False) -> Iterator[None]:
        before = self.enabled, self.deterministic
        self.enabled, self.deterministic = enabled, deterministic
        yield
        self.enabled, self.deterministic = before


def test_recurrent_layers_on_the_lowest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = OlderBackend()
    monkeypatch.setattr(torch.backends, "mkldnn", backend)
    with differentiable_kernels(recurrent=True):
        assert (backend.enabled, backend.deterministic) == (False, True)
    assert (backend.enabled, backend.deterministic) == (True, True)
