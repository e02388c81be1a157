"""A Laplace posterior on disk: the curvature's own file, and one for prior, likelihood and sums."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.errors import FileFormatError, InputError
from linnet.files import as_path, load_tensors, save_tensors
from linnet.laplace.posterior import DataFit, Hyper, Posterior
from linnet.laplace.prior import Groups
from linnet.likelihoods import from_description
from linnet.likelihoods.likelihood import Likelihood, check_likelihood

KIND = "laplace"


def write_posterior(
    directory: str | Path,
    posterior: Posterior,
    groups: Groups,
    hyper: Hyper,
    likelihood: Likelihood,
    shape: tuple[int, ...],
) -> Path:
    """Write a posterior."""
    curvature = posterior.curvature.save(directory)
    tensors = {
        "prior": hyper.prior,
        "scale": hyper.scale,
        "noise": hyper.noise,
        "mean": posterior.mean,
    }
    metadata = {
        "form": groups.form,
        "groups": list(groups.names),
        "damping": posterior.damping,
        "fitted": asdict(posterior.fitted),
        "likelihood": likelihood.describe(),
        "shape": list(shape),
        "curvature": _checksum(curvature),
    }
    return save_tensors(directory, KIND, {k: t.detach().contiguous() for k, t in tensors.items()}, metadata)


def read_posterior(directory: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_posterior`` wrote, the curvature apart."""
    path = as_path(directory)
    tensors, metadata = load_tensors(path / f"{KIND}.safetensors", KIND)
    other = path / "curvature.safetensors"
    if other.exists() and _checksum(other) != metadata["curvature"]:
        raise FileFormatError(
            f"{path} holds a posterior and a curvature that were not saved together",
            expected="both files of one call of save",
            remedy="save the posterior again",
        )
    return tensors, metadata


def restored(curvature: Curvature, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Posterior:
    """The posterior of a saved curvature."""
    mean = tensors["mean"].to(curvature.function.device)
    return Posterior(curvature, DataFit(**metadata["fitted"]), mean, metadata["damping"])


def restored_hyper(tensors: dict[str, Tensor], device: torch.device) -> Hyper:
    """The hyper-parameters of a saved posterior."""
    return Hyper(*(tensors[name].to(device) for name in ("prior", "scale", "noise")))


def restored_likelihood(described: dict[str, Any], given: Likelihood | None) -> Likelihood:
    """The likelihood of a saved posterior."""
    if given is not None:
        check_likelihood(given)
        if given.describe() != described:
            raise InputError(
                f"likelihood={given!r}, but the posterior was saved with {described}",
                expected="the same likelihood",
                remedy="leave likelihood= out, or pass the one of the fit",
            )
        return given
    if described["kind"] == "Custom":
        raise InputError(
            "likelihood is missing, and a Custom one, made of functions, cannot be read from a file",
            expected="the likelihood that the posterior was fitted with",
            remedy="pass likelihood= to load_laplace",
        )
    return from_description(described)


def _checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
