"""Run the neural-tangents peer in its own interpreter and collect what it measured."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class PeerResult:
    """What one implementation of the peer took; ``kernel`` is (N, C, N, C)."""

    implementation: str
    median: float
    minimum: float
    first_call: float
    peak_bytes: int
    kernel: torch.Tensor


class PeerError(Exception):
    """The peer ended with an error or ran out of time; the text is the last line it wrote."""


@dataclass(frozen=True)
class NeuralTangents:
    """neural-tangents 0.6.5 in an environment of its own."""

    python: str
    threads: int = 2
    repeats: int = 3
    timeout: float = 900.0

    def run(self, model: nn.Module, x: torch.Tensor, implementation: str, *options: str) -> PeerResult:
        """Measure one implementation.

        Args:
            model: A network of ``networks`` with weights to send.
            x: Images (N, 3, 32, 32).
            implementation: "contraction", "products" or "structured".
            options: More options of ``neural_tangents_peer.py``, ``--network`` among them.

        Returns:
            The peer's timings and kernel.

        Raises:
            PeerError: The peer failed.
        """
        script = Path(__file__).with_name("neural_tangents_peer.py")
        with tempfile.TemporaryDirectory() as folder:
            problem, result, kernel = (str(Path(folder, name)) for name in ("p.npz", "r.json", "k.npy"))
            arrays = {name: value.numpy() for name, value in model.state_dict().items()}
            np.savez(problem, x=x.numpy(), **arrays)
            cores = ",".join(str(index) for index in range(self.threads))
            command = ["taskset", "-c", cores, self.python, str(script), problem, result, kernel]
            command += ["--implementation", implementation, "--repeats", str(self.repeats), *options]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout)
            except subprocess.TimeoutExpired:
                raise PeerError(f"did not finish in {self.timeout:g} s") from None
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"killed, status {done.returncode}"]
                raise PeerError(lines[-1][:200])
            record = json.loads(Path(result).read_text())
            # neural-tangents puts the output axes last: (N, N, C, C)
            value = torch.from_numpy(np.load(kernel)).permute(0, 2, 1, 3)
        return PeerResult(
            implementation,
            record["median"],
            record["minimum"],
            record["first_call"],
            record["peak_bytes"],
            value,
        )
