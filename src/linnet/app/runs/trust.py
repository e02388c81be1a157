"""Trust: code named by a run folder or a settings file runs only if the user named or trusted it.

A run folder names the Python file that builds its network, and a settings file may. Whoever wrote them could
name any code, so digests of the runs that this user made or trusted, and of factories that were named, are
kept in a folder of this user: ``$LINNET_STATE``, else ``linnet`` in ``$XDG_STATE_HOME`` or in
``~/.local/state``. What is not known there needs ``--trust``, or the factory named on the command line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from linnet.app.options import listed
from linnet.errors import InputError, ModelError
from linnet.files import read_json
from linnet.integrations.pretrained import BUILDERS, code_arguments

OWN = "code that you have named or trusted: a Python file can do whatever you can"
UNKNOWN = "which you have not named, or which has changed since"


def check_run(
    folder: Path, record: Mapping[str, Any], spec: str, arguments: Mapping[str, Any], named: bool
) -> None:
    """Require that opening a run executes no code that its user has neither named nor trusted."""
    if _is_known(record, spec):
        return
    if asked := code_arguments(arguments):
        raise InputError(
            f"the run {folder} passes {', '.join(asked)} to {spec}, which may run code of others",
            expected=OWN,
            remedy="where you trust whoever made the run, pass --trust",
        )
    file = factory_file(spec)
    if named or file is None:
        return
    if not file.is_file():
        raise ModelError(
            f"the run {folder} was made with {spec}, and there is no such file here",
            expected="the factory that the run was made with",
            remedy="name it with --model FILE:FACTORY",
        )
    raise InputError(f"opening {folder} would run {spec}, {UNKNOWN}", OWN, _remedy(file))


def check_settings(values: Mapping[str, Any], typed: Mapping[str, Any] | None, trust: bool) -> None:
    """Require that settings from a file execute no code that its user has neither named nor trusted."""
    for model in listed(values.get("model")):
        _check_factory(model, values, typed, trust)


def _check_factory(
    model: str, values: Mapping[str, Any], typed: Mapping[str, Any] | None, trust: bool
) -> None:
    """Require that a network's name executes no code that its user has neither named nor trusted."""
    spec = absolute_spec(model)
    file = factory_file(spec)
    asked = code_arguments(values.get("model_args") or {})
    own = () if typed is None else code_arguments(typed.get("model_args") or {})
    if typed is not None and (asked := tuple(name for name in asked if name not in own)):
        raise InputError(
            f"the settings file passes {', '.join(asked)} to {model}, which may run code of others",
            expected="such an argument on the command line, not in a file",
            remedy="give it yourself, as JSON after --model-args, or take it out of the file",
        )
    if typed is None or model in listed(typed.get("model")) or trust:
        _remember("model", spec)
    elif file is not None and file.is_file() and not _is_known("model", spec):
        raise InputError(f"the settings file would run {spec}, {UNKNOWN}", OWN, _remedy(file))


def remember_run(folder: Path) -> None:
    """Take a run for one that this user made or trusts."""
    record = read_json(folder / "run.json", "run")
    _remember(record, record["origin"]["spec"])


def absolute_spec(spec: str) -> str:
    """A network's name that means the same in every folder."""
    source, colon, name = spec.rpartition(":")
    if colon and spec.partition(":")[0] not in BUILDERS:
        return f"{Path(source).resolve()}:{name}"
    return spec


def factory_file(spec: str) -> Path | None:
    """The Python file that a network's name stands for."""
    source, colon, _ = spec.rpartition(":")
    return Path(source) if colon and spec.partition(":")[0] not in BUILDERS else None


def state_folder() -> Path | None:
    """The folder of this user in which linnet keeps what it must remember; None for a user without a home."""
    if given := os.environ.get("LINNET_STATE"):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, by the XDG specification
        return Path(base) / "linnet"
    try:
        return Path.home() / ".local" / "state" / "linnet"
    except RuntimeError:
        return None


def _remember(subject: object, spec: str) -> None:
    """Keep the digest of a subject with its code; without a folder to keep it in, do not."""
    if (place := _place(subject, spec)) is not None:
        with suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.touch()


def _is_known(subject: object, spec: str) -> bool:
    """Whether a subject is remembered with this code, in a folder to which nobody else can write."""
    place = _place(subject, spec)
    if place is None or not place.is_file():
        return False
    folder = place.parent.stat()
    return os.name != "posix" or (folder.st_uid == os.getuid() and not folder.st_mode & 0o022)


def _place(subject: object, spec: str) -> Path | None:
    """The file that stands for a subject and its code; None where either is not there."""
    file, folder = factory_file(spec), state_folder()
    if folder is None or (file is not None and not file.is_file()):
        return None
    code = "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    name = hashlib.sha256(json.dumps([subject, spec, code], sort_keys=True).encode()).hexdigest()
    return folder / "trusted" / name


def _remedy(file: Path) -> str:
    """The remedy that allows the code."""
    return f"read {file}; where you trust it, pass --trust, or name it yourself with --model FILE:FACTORY"
