"""Check a certificate of forgetting without linnet: with PyTorch, the network, and the data that are left.

    python verify_certificate.py certificate.json --model net.py:make --weights net.pt --data rest.npz

``rest.npz`` holds ``x`` (or one array for each named input of the network) and ``y``: the examples that the
fit still has, in any order, with labels as its ``targets`` has them (of texts those of the next token). The
fingerprints of network and examples are computed here, and the gradient of

    F(δ) = Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖².

As F is ρ-strongly convex, δ is no further than ‖∇F(δ)‖/ρ from the one optimum of these examples, which is
what a fit has that never saw the others: whoever made it, and how. That those are the right ones nothing
here can say; ``--forgotten mine.npz``, with ``x`` and ``y`` as above, asks whether examples are among those
that the certificate names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

FORMAT = "forgetting certificate 1"
BATCH = 32  # examples at a time
KEYS = ("loss", "ridge", "axis", "scale", "output", "network", "displacement", "retained", "forgotten")
Tensors = dict[str, torch.Tensor]


def fingerprint(arrays: Mapping[str, Any], floats: str = "<f4") -> str:
    """SHA-256 of named arrays, whatever types hold them: floats are taken as the network has them."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        plain = np.ascontiguousarray(array, floats if array.dtype.kind == "f" else "<i8")
        digest.update(f"{name}:{plain.dtype.str}:{plain.shape}:".encode())
        digest.update(plain.tobytes())
    return digest.hexdigest()


def fingerprints(data: Mapping[str, Any], floats: str = "<f4") -> list[str]:
    """One of each example."""
    count = range(len(data["y"]))
    return [fingerprint({name: part[i] for name, part in data.items()}, floats) for i in count]


def as_fitted(data: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Data as the fit took them: numbers where the network takes them, classes where targets were classes."""
    found = {name: np.asarray(part) for name, part in data.items()}
    y = found["y"]
    if kinds.get("y") in ("i", "u") and y.dtype.kind == "f" and np.isin(y, (0, 1)).all():
        found["y"] = y.argmax(1) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(len(y)).astype("<i8")
    wanted = {name for name, kind in kinds.items() if name != "y" and kind == "f"}
    return {name: part.astype("<f8") if name in wanted and part.dtype.kind in "iub" else part
            for name, part in found.items()}  # fmt: skip


def of_network(net: torch.nn.Module) -> str:
    """The fingerprint of everything that a network holds."""
    held = net.state_dict().items()
    return fingerprint({name: t.detach().cpu().to(torch.float32 if t.is_floating_point() else t.dtype).numpy()
                        for name, t in held})  # fmt: skip


def loss(f: torch.Tensor, y: torch.Tensor, about: Mapping[str, Any]) -> torch.Tensor:
    """Σᵢ ℓ(fᵢ, yᵢ) of the certificate's loss."""
    entropy, classes = torch.nn.functional.cross_entropy, not y.is_floating_point()
    if about["axis"] is not None:
        return entropy(f.movedim(about["axis"], 1), y, ignore_index=-100, reduction="sum")
    f = f.reshape(len(f), -1)
    if about["loss"] == "squared":
        t = about["scale"] * torch.eye(f.shape[1], dtype=f.dtype)[y] if classes else y
        return 0.5 * (f - t.reshape(f.shape)).square().sum()
    if f.shape[1] == 1:
        y = y.reshape(f.shape).to(f)
        return torch.nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum")
    return entropy(f, y, reduction="sum")


def gradient(net: torch.nn.Module, delta: Tensors, data: Tensors, about: Mapping[str, Any]) -> torch.Tensor:
    """∇F(δ), (P,)."""
    theta = {name: value.detach() for name, value in net.named_parameters() if name in delta}
    total = [about["ridge"] * delta[name] for name in theta]
    for rows in torch.arange(len(data["y"])).split(BATCH):
        parts = {name: part[rows] for name, part in data.items() if name != "y"}

        def call(at: Tensors, parts: Tensors = parts) -> torch.Tensor:
            inputs = ((parts["x"],), {}) if set(parts) == {"x"} else ((), parts)
            found = functional_call(net, at, *inputs)
            return found if isinstance(found, torch.Tensor) else found[about["output"] or "logits"]

        f, moved = jvp(call, (theta,), (delta,))[:2]
        slope = grad(loss)(f + moved, data["y"][rows], about)
        pulled = vjp(call, theta)[1](slope)[0]
        total = [own + pulled[name] for own, name in zip(total, theta, strict=True)]
    return torch.cat([part.flatten() for part in total])


def verified(
    about: Mapping[str, Any], net: torch.nn.Module, weights: Any, data: Mapping[str, Any]
) -> dict[str, Any]:
    """What is true of a certificate, its displacement of the weights, a network and data."""
    data = as_fitted(data, about.get("kinds", {}))
    network, own = of_network(net), fingerprints(data, about.get("floats", "<f4"))
    ridge = float(about["ridge"])
    if not 0 < ridge < math.inf:
        raise SystemExit(f"ridge is {ridge}, expected a positive number: the certificate is none")
    kind = next((t.dtype for t in net.parameters() if t.is_floating_point()), torch.float64)
    net = net.double().eval()
    inputs = {name: torch.as_tensor(part) for name, part in data.items()}
    # as the network takes them, in its own type
    inputs = {
        name: part.to(kind).double() if part.is_floating_point() else part for name, part in inputs.items()
    }
    delta = {name: torch.as_tensor(weights[name]).double() for name in weights}
    with sdpa_kernel(SDPBackend.MATH):  # the one kernel of attention that has forward derivatives
        distance = float(gradient(net, delta, inputs, about).detach().norm()) / ridge
    size = float(torch.cat([part.flatten() for part in delta.values()]).norm())
    return {
        "network": network == about["network"],
        "displacement": fingerprint(dict(weights)) == about["displacement"],
        "examples": sorted(own) == sorted(about["retained"]),
        "retained and forgotten": [len(about["retained"]), len(about["forgotten"])],
        "forgotten examples among the data": len(set(own) & set(about["forgotten"]) - set(about["retained"])),
        "copies of forgotten examples that were kept": len(set(about["forgotten"]) & set(about["retained"])),
        "distance to a fit that never saw them, at most": distance,
        "relative": distance / size if size else math.inf if distance else 0.0,
        "of the objective with loss and ridge": [about["loss"], ridge],
    }


def main() -> int:
    """Check what is named on the command line; 0 where all of it holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("certificate", type=Path)
    parser.add_argument("--model", required=True, help="FILE.py:FUNCTION that makes the network")
    parser.add_argument("--weights", type=Path, help="its weights before the fit, a state dict")
    parser.add_argument("--data", type=Path, required=True, help="an .npz file with x and y")
    parser.add_argument("--forgotten", type=Path, help="the same of examples that should be forgotten")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the relative distance (1e-3)")
    given = parser.parse_args()
    about = json.loads(given.certificate.read_text(encoding="utf-8"))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        parser.error(f"{given.certificate} is no {FORMAT!r}")
    if missing := [key for key in KEYS if about.get(key) is None and key not in ("axis", "output")]:
        parser.error(
            f"{given.certificate} has no {', '.join(map(repr, missing))}: it was changed, or cut off"
        )
    file, _, make = given.model.rpartition(":")
    net = runpy.run_path(file)[make]()
    if given.weights is not None:
        net.load_state_dict(torch.load(given.weights, weights_only=True))
    with np.load(given.certificate.with_name("displacement.npz")) as weights, np.load(given.data) as data:
        found = verified(about, net, dict(weights), dict(data))
    if given.forgotten is not None:
        with np.load(given.forgotten) as asked:
            if "y" not in asked or not len(asked["y"]):
                parser.error(f"{given.forgotten} has no examples, x and y")
            named = as_fitted(dict(asked), about.get("kinds", {}))
        gone = set(about["forgotten"]) - set(about["retained"])
        found["named"] = all(name in gone for name in fingerprints(named, about.get("floats", "<f4")))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    holds = found["network"] and found["displacement"] and found["examples"] and found.get("named", True)
    return int(not (holds and found["relative"] <= given.tolerance))


if __name__ == "__main__":
    sys.exit(main())
