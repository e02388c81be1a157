"""``linnet.load``: loads any object that linnet saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from linnet import params as check
from linnet.curvatures.curvature import restored_curvature
from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.files import as_path
from linnet.files import load as load_tree
from linnet.finetuning.finetuned import restored_finetuned
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.saved import restored_fit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.laplace.laplace import restored_laplace
from linnet.likelihoods.likelihood import Likelihood
from linnet.nested.nested_fit import restored_nested
from linnet.tangent.functional import OutputAdapter
from linnet.tangent_gp.tangent_gp import restored_gp

# What makes an object of a saved tree, by the name of the file, less its ending; each checks the network.
READERS: dict[str, Callable[..., Any]] = {
    "linear-fit": restored_fit,
    "nested-fit": restored_nested,
    "laplace": restored_laplace,
    "tangent-gp": restored_gp,
    "finetuned": restored_finetuned,
    "curvature": restored_curvature,
}


def load(
    directory: str | Path,
    model: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    output: OutputAdapter = None,
) -> Any:
    """Read what a ``save`` of linnet wrote, whatever it is.

    Args:
        directory: The folder, or the file in it.
        model: The network that it was made of, with the same weights; where ``params=`` had masks, its
            linearization with the same ones, ``linnet.linearize(network, params=...)``.
        likelihood: A Laplace posterior's, if it is one of your own.
        output: The output adapter, if it was made with a callable one.

    Returns:
        The fit, posterior, process, fine-tuned network or curvature, able to do all that it could before.

    Raises:
        FileFormatError: If the file is truncated, altered, not linnet's, or of another network.
        InputError: If there is no such folder, it holds nothing that linnet wrote or several such things, or
            an argument does not go with what it holds.

    Example:
        >>> import linnet, tempfile, torch
        >>> net, x = nn.Linear(2, 1), torch.ones(3, 2).cumsum(0)
        >>> folder = tempfile.mkdtemp()
        >>> _ = linnet.fit(linnet.linearize(net), (x, x[:, :1]), ridge=1.0).save(folder)
        >>> type(load(folder, net)).__name__
        'LinearFit'
    """
    check.instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
    place = as_path(directory)
    is_file = bool(place.suffix) and not place.is_dir()
    there = [place] if is_file else sorted(place.glob("*.safetensors"))
    found = [file for file in there if file.stem in READERS and file.is_file()]
    if len(found) != 1:
        names = ", ".join(f"{name}.safetensors" for name in READERS)
        several = f"{directory} holds {', '.join(file.name for file in found)}"
        nothing = f"{directory} holds none of the files that linnet writes"
        missing = "" if place.exists() else ": there is no such folder"
        raise InputError(
            several if found else nothing + missing,
            expected=f"one of {names}",
            remedy="name the file itself" if found else "pass what save(...) returned",
        )
    kind, options = found[0].stem, dict[str, Any](output=output)
    if kind == "laplace":
        options["likelihood"] = likelihood
    elif likelihood is not None:
        raise InputError(
            f"likelihood= with {found[0].name}", expected="no likelihood", remedy="leave likelihood= out"
        )
    return _read(kind, found[0], model, options)


def load_fit(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> LinearFit | SoftmaxFit:
    """Read a fit that ``LinearFit.save`` or ``SoftmaxFit.save`` wrote, whatever else is in its folder.

    Args:
        directory: The folder, or the file in it.
        model: The network that was linearized, with the same weights, or its linearization.
        output: The output adapter, if the fit was made with a callable one.

    Returns:
        The fit, able to do all that it could before; a ``SoftmaxFit`` where the loss was the cross-entropy.

    Raises:
        FileFormatError: If the file is truncated, altered, not linnet's, or of another network.
        InputError: If there is no such file, or ``output`` is needed and not given.

    Example:
        >>> import linnet, tempfile, torch
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> folder = tempfile.mkdtemp()
        >>> _ = linnet.fit(linnet.linearize(net), (x, x[:, :1])).save(folder)
        >>> load_fit(folder, net).ridge
        1.0
    """
    check.instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
    place = as_path(directory)
    file = place / "linear-fit.safetensors" if place.is_dir() or not place.suffix else place
    others = [name for name in READERS if (place / f"{name}.safetensors").is_file()]
    if others and not file.is_file():
        raise InputError(
            f"{directory} holds {others[0]}.safetensors, and load_fit reads linear-fit.safetensors",
            expected="a folder that LinearFit.save or SoftmaxFit.save wrote",
            remedy="linnet.load(directory, model) reads all that linnet saves",
        )
    found: LinearFit | SoftmaxFit = _read("linear-fit", file, model, {"output": output})
    return found


def _read(kind: str, file: Path, model: nn.Module, options: dict[str, Any]) -> Any:
    """What a file holds; checksums say that it is as it was written, not that linnet wrote it."""
    saved = load_tree(file, kind)
    try:
        return READERS[kind](saved, file, model, **options)
    except LinnetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(
            f"{file} is whole, but lacks what it must say, or the model cannot be run with it "
            f"({type(error).__name__}: {error})",
            expected="what save(...) of this version of linnet wrote, and the network that it was made of",
            remedy="save it again; the error above this one says where reading it ended",
        ) from error
