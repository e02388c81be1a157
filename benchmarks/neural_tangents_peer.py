"""Time the empirical tangent kernel of neural-tangents; run by the other benchmarks with the peer's python.

Its environment: ``pip install jax==0.4.30 jaxlib==0.4.30 neural-tangents==0.6.5 tf2jax==0.3.6
"numpy<2"``. This file imports neither torch nor linnet. It reads weights (PyTorch's names and layouts)
and inputs from an .npz file, computes the kernel with each implementation asked for, compiled by jax.jit
with the compilation left out of the timing, and writes the timings as JSON and the kernel as .npy.

    python neural_tangents_peer.py problem.npz result.json kernel.npy --network lenet
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import source_info_util
from jax.interpreters import ad

# Two names that neural-tangents 0.6.5 looks up in jax.interpreters.ad have moved by jax 0.4.30; structured
# derivatives need both.
ad.source_info_util = source_info_util
ad.config = jax.config

import neural_tangents as nt  # noqa: E402

Weights = dict[str, Any]
IMPLEMENTATIONS = {
    "contraction": nt.NtkImplementation.JACOBIAN_CONTRACTION,
    "products": nt.NtkImplementation.NTK_VECTOR_PRODUCTS,
    "structured": nt.NtkImplementation.STRUCTURED_DERIVATIVES,
}


def convolution(x: Any, weight: Any, stride: int = 1, padding: int = 0) -> Any:
    """Convolution of (N, H, W, C) maps with an (H, W, in, out) kernel: the layout XLA likes best on CPUs."""
    pads = [(padding, padding)] * 2
    return lax.conv_general_dilated(
        x, weight, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(x: Any, kind: str) -> Any:
    """2x2 pooling with stride 2."""
    windows = (1, 2, 2, 1)
    if kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, windows, windows, "VALID")
    return lax.reduce_window(x, 0.0, lax.add, windows, windows, "VALID") / 4


def lenet(pooling: str) -> Callable[[Weights, Any], Any]:
    """LeNet, the layers numbered as in the torch.nn.Sequential it mirrors."""

    def function(w: Weights, x: Any) -> Any:
        for name in ("0", "3"):
            x = pool(jax.nn.relu(convolution(x, w[name + ".weight"]) + w[name + ".bias"]), pooling)
        x = x.reshape(x.shape[0], -1)
        for name in ("7", "9"):
            x = jax.nn.relu(x @ w[name + ".weight"] + w[name + ".bias"])
        return x @ w["11.weight"] + w["11.bias"]

    return function


def resnet(statistics_: Weights) -> Callable[[Weights, Any], Any]:
    """Residual network in evaluation mode: batch normalization scales and shifts a standardized input."""

    def normalize(w: Weights, name: str, x: Any) -> Any:
        inverse = 1 / np.sqrt(statistics_[name + ".running_var"] + 1e-5)
        return (x - statistics_[name + ".running_mean"]) * inverse * w[name + ".weight"] + w[name + ".bias"]

    def function(w: Weights, x: Any) -> Any:
        x = jax.nn.relu(normalize(w, "bn1", convolution(x, w["conv1.weight"], 1, 1)))
        index = 0
        while f"blocks.{index}.conv1.weight" in w:
            prefix = f"blocks.{index}."
            first = w[prefix + "conv1.weight"]
            stride = 2 if first.shape[2] != first.shape[3] else 1
            inner = jax.nn.relu(normalize(w, prefix + "bn1", convolution(x, first, stride, 1)))
            inner = normalize(w, prefix + "bn2", convolution(inner, w[prefix + "conv2.weight"], 1, 1))
            if stride == 2:
                pad = (first.shape[3] - first.shape[2]) // 2
                x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (pad, pad)))
            x = jax.nn.relu(inner + x)
            index += 1
        return x.mean((1, 2)) @ w["linear.weight"] + w["linear.bias"]

    return function


def to_channels_last(name: str, value: Any, flattened: tuple[int, int] | None) -> Any:
    """A weight of PyTorch's layout in the layout used here."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim == 2 and name == "7.weight" and flattened is not None:
        # the flattened map is (channels, pixels) there and (pixels, channels) here
        return value.reshape(value.shape[0], *flattened).transpose(2, 1, 0).reshape(-1, value.shape[0])
    return value.T if value.ndim == 2 else value


def load(path: str, network: str, pooling: str) -> tuple[Callable[[Weights, Any], Any], Weights, Any]:
    """The function, its parameters and its inputs (N, H, W, C)."""
    archive = np.load(path)
    flattened = (50, 25) if network == "lenet" else None
    weights, fixed = {}, {}
    for name in archive.files:
        if name == "x" or name.endswith("num_batches_tracked"):
            continue
        target = fixed if "running_" in name else weights
        target[name] = to_channels_last(name, archive[name], flattened)
    function = lenet(pooling) if network == "lenet" else resnet(fixed)
    parameters = {name: jnp.asarray(value) for name, value in weights.items()}
    return function, parameters, jnp.asarray(archive["x"].transpose(0, 2, 3, 1))


def measure(kernel: Callable[..., Any], x: Any, parameters: Weights, repeats: int, limit: float) -> Any:
    """Median, minimum and compilation seconds, and the kernel."""
    begin = time.perf_counter()
    value = jax.block_until_ready(kernel(x, None, parameters))
    first = time.perf_counter() - begin
    seconds: list[float] = []
    while len(seconds) < repeats and (len(seconds) < 2 or sum(seconds) < limit):
        begin = time.perf_counter()
        value = jax.block_until_ready(kernel(x, None, parameters))
        seconds.append(time.perf_counter() - begin)
    record = {
        "median": statistics.median(seconds),
        "minimum": min(seconds),
        "repeats": len(seconds),
        "first_call": first,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return record, np.asarray(value)


def main() -> None:
    """Entry point."""
    arguments = argparse.ArgumentParser(description="Time neural-tangents on one kernel.")
    arguments.add_argument("problem")
    arguments.add_argument("result")
    arguments.add_argument("kernel")
    arguments.add_argument("--network", choices=["lenet", "resnet"], required=True)
    arguments.add_argument("--pool", choices=["max", "average"], default="max")
    arguments.add_argument("--implementation", choices=list(IMPLEMENTATIONS), required=True)
    arguments.add_argument("--examples", type=int, default=None, help="use the first examples only")
    arguments.add_argument(
        "--batch", type=int, default=0, help="nt.batch size, 0 for the whole kernel at once"
    )
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--limit", type=float, default=60.0)
    options = arguments.parse_args()

    function, parameters, x = load(options.problem, options.network, options.pool)
    x = x[: options.examples]
    kernel = nt.empirical_ntk_fn(
        function,
        trace_axes=(),
        vmap_axes=0,
        implementation=IMPLEMENTATIONS[options.implementation],
    )
    kernel = nt.batch(kernel, options.batch) if options.batch else jax.jit(kernel)
    record, value = measure(kernel, x, parameters, options.repeats, options.limit)
    record["load_average"] = os.getloadavg()[0]
    np.save(options.kernel, value)
    with open(options.result, "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main()
