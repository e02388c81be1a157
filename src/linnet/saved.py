"""``linnet.load``: loads any object that linnet saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from linnet import params as check
from linnet.curvatures.curvature import restored_curvature
from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.files import as_path
from linnet.files import load as load_tree
from linnet.finetuning.finetuned import restored_finetuned
from linnet.fitting.load_fit import load_fit
from linnet.laplace.laplace import restored_laplace
from linnet.likelihoods.likelihood import Likelihood
from linnet.nested.adapt import load_adapted
from linnet.tangent.functional import OutputAdapter
from linnet.tangent_gp.load import load_gp

# By the name of the file, less its ending. Each knows how to check what it reads.
READERS: dict[str, Any] = {
    "linear-fit": lambda file, model, **options: load_fit(file.parent, model, **options),
    "nested-fit": lambda file, model, **options: load_adapted(file.parent, model, **options),
    "laplace": lambda file, *given, **options: restored_laplace(_tree(file), file, *given, **options),
    "tangent-gp": lambda file, model, **options: load_gp(file.parent, model, **options),
    "finetuned": lambda file, *given, **options: restored_finetuned(_tree(file), file, *given, **options),
    "curvature": lambda file, *given, **options: restored_curvature(_tree(file), file, *given, **options),
}
OPTIONS = {  # what a reader takes besides the folder and the network
    "linear-fit": ("output",),
    "nested-fit": ("output",),
    "laplace": ("likelihood", "output"),
    "tangent-gp": ("output",),
    "finetuned": ("output",),
    "curvature": ("output",),
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
    kind = found[0].stem
    given = {"likelihood": likelihood, "output": output}
    options = {name: value for name, value in given.items() if value is not None}
    wrong = [name for name in options if name not in OPTIONS[kind]]
    if wrong:
        raise InputError(
            f"{wrong[0]}= with {found[0].name}", expected=f"no {wrong[0]}", remedy=f"leave {wrong[0]}= out"
        )
    return _read(kind, found[0], model, options)


def _tree(file: Path) -> Any:
    """What a file holds, network and checks apart."""
    return load_tree(file, file.stem)


def _read(kind: str, file: Path, model: nn.Module, options: dict[str, Any]) -> Any:
    """What a file holds; checksums say that it is as it was written, not that linnet wrote it."""
    try:
        return READERS[kind](file, model, **options)
    except LinnetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(
            f"{file} is whole, but lacks what it must say, or the model cannot be run with it "
            f"({type(error).__name__}: {error})",
            expected="what save(...) of this version of linnet wrote, and the network that it was made of",
            remedy="save it again; the error above this one says where reading it ended",
        ) from error
