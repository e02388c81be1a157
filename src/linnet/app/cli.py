"""Entry point of the command line: dispatch, results and errors.

Nothing here imports torch, so that help answers at once.

Exit status: 0 done, 1 done with a negative answer (a check that fails), 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from linnet import __version__
from linnet.app.commands import COMMANDS
from linnet.app.parsing import FLAGS, CallOptions, Command, option
from linnet.app.terminal import accept_any_character, folded, folding
from linnet.distribution import require_application, require_own_package
from linnet.errors import InputError, LinnetError

_OPTIONS = {
    "--help": "Show this page; linnet COMMAND --help shows its own",
    "--version": "Show the version",
    "-q, -v": "Say less, or more; before or after any command, as --json",
}
_SHORT = {"-q": "--quiet", "-v": "--verbose"}
_REPLAY = "run.yaml"
_SHARED = ("adapt",)  # commands of which every process that torchrun starts does a part
_RUNS = ("demo", "adapt", "forget", "update")  # commands that write a run into a folder of their own
_AUTO = "auto"  # the device of a machine that is not known yet
_NOTHING = object()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    accept_any_character()
    try:
        return _run(words)
    except KeyboardInterrupt as stop:
        print(f"linnet: interrupted{'; ' * bool(stop.args)}{' '.join(stop.args)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`linnet ... | head`); Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except LinnetError as error:
        if "--traceback" in words:
            raise
        if _rank() == 0 or not _is_told(error):
            _print_error(error, words)
        return 2
    except OSError as error:  # a disk that is full for our output, a folder that vanished
        if "--traceback" in words:
            raise
        place = error.filename or "the output"
        _print_error(
            InputError(
                f"{place} cannot be read or written: {error.strerror or type(error).__name__}",
                expected="existing files and folders, on a disk with enough space",
                remedy="see whether the disk is full; --traceback shows where it happened",
            ),
            words,
        )
        return 2


def _run(words: list[str]) -> int:
    """Dispatch to help, the version or a command."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"linnet {__version__}")
        return 0
    words = [_SHORT.get(word, word) for word in words]
    before = list(itertools.takewhile(FLAGS.__contains__, words))  # a flag may stand before the command too
    name, options = "".join(words[len(before) : len(before) + 1]), [*words[len(before) + 1 :], *before]
    if not name or name in ("-h", "--help", "--version"):
        return _run([name or "--help"])
    if name not in COMMANDS:
        raise _unknown_command(name)
    require_own_package()
    # doctor says itself which packages are missing
    require_application(*(["yaml"] if name == "doctor" else []))
    command = Command.load(name)
    if {"-h", "--help"} & set(options):
        print(command.help())
        return 0
    flags = {flag for flag in command.flags if flag in options}
    if {"--quiet", "--verbose"} <= flags:
        raise InputError("--quiet and --verbose contradict each other", remedy="give one of them")
    asks = {"--print_config", "--print-config"} & set(options)
    settings = command.parse([word for word in options if word not in flags | asks], is_whole=not asks)
    if asks:
        print(settings.yaml, end="")
        return 0
    with _messages(settings, flags):
        return _execute(command, settings, flags)


@contextlib.contextmanager
def _messages(settings: CallOptions, flags: AbstractSet[str]) -> Iterator[None]:
    """The level of messages on standard error: none, progress, or everything."""
    amount = "0" if "--quiet" in flags else "2" if "--verbose" in flags else os.environ.get("LINNET_PROGRESS")
    before, start = os.environ.get("LINNET_PROGRESS"), time.monotonic()
    if amount is not None:
        os.environ["LINNET_PROGRESS"] = amount
    if "--verbose" in flags:
        print(textwrap.indent(settings.yaml.rstrip(), "  "), file=sys.stderr)
    try:
        yield
    finally:
        if amount is not None and before is None:
            del os.environ["LINNET_PROGRESS"]
        elif before is not None:
            os.environ["LINNET_PROGRESS"] = before
        if "--verbose" in flags:
            from linnet.progress import format_seconds

            print(f"{format_seconds(time.monotonic() - start)} in all", file=sys.stderr)


def _execute(command: Command, settings: CallOptions, flags: AbstractSet[str]) -> int:
    """Call the command, and leave the settings beside what it wrote, even when it was interrupted."""
    as_json, trust = "--json" in flags, "--trust" in flags
    values = dict(settings.values)
    folder = values.get("out")
    is_open = values.get("device") == _AUTO
    if is_open:
        from linnet.machine import fastest_device

        values["device"] = str(fastest_device())
    if values.get("model") is not None:
        from linnet.app.runs.trust import check_settings

        check_settings(values, settings.typed, trust)
    if "trust" in command.types:
        values["trust"] = trust
    result: Any = _NOTHING
    with _started(command, values) as goes_on, _claimed(command, settings, goes_on):
        if not goes_on:
            return 0
        try:
            silent = as_json or "--quiet" in flags
            with contextlib.redirect_stdout(io.StringIO()) if silent else folding():
                if is_open:
                    print(f"device: {values['device']}")
                result = command(values)
        except BrokenPipeError:  # what is printed last has no reader: all is written already
            _write_replay(command.name, settings, folder)
            raise
        except KeyboardInterrupt:
            resumes = command.name == "adapt" and not _rank()
            if resumes or command.name not in _RUNS:
                _write_replay(command.name, settings, folder)
            if resumes:
                raise KeyboardInterrupt("the same command continues where it stopped") from None
            raise
        _write_replay(command.name, settings, folder)
    if result is _NOTHING:  # of a process that has done its share of another one's command
        return 0
    if as_json:
        from linnet.files import finite

        print(json.dumps(finite(result), indent=2, allow_nan=False, default=str))
    sys.stdout.flush()
    return int(isinstance(result, Mapping) and result.get("ok") is False)


def _rank() -> int:
    """The number of this process among those that torchrun started."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


@contextlib.contextmanager
def _started(command: Command, values: Mapping[str, Any]) -> Iterator[bool]:
    """The processes of torchrun: all of them where a command shares its work, the first alone elsewhere."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield True
    elif command.name not in _SHARED:
        yield _rank() == 0
    else:
        from linnet.app.runs.place import Group, Released

        quiet = contextlib.nullcontext() if _rank() == 0 else contextlib.redirect_stdout(io.StringIO())
        if _rank():
            os.environ["LINNET_PROGRESS"] = "0"
        with contextlib.suppress(Released), quiet, Group(f"linnet {command.name}", str(values["device"])):
            yield True


def _claimed(
    command: Command, settings: CallOptions, goes_on: bool = True
) -> contextlib.AbstractContextManager[None]:
    """The folder of a command that writes a run, for this process alone until the settings are in it too."""
    values = settings.values
    if command.name not in _RUNS or not goes_on:
        return contextlib.nullcontext()
    from linnet.app.runs.place import claimed

    overwrite = bool(values["overwrite"])
    return claimed(Path(values["out"]), command.name, settings.yaml, overwrite, values.get("run"))


def _write_replay(name: str, settings: CallOptions, folder: object) -> None:
    """Write the settings into the run's folder, where there is one, in the form that `--config` reads."""
    if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
        return
    from linnet.app.runs.place import plain_settings
    from linnet.files import write_text

    path = Path(folder) / _REPLAY
    if path.exists() and f"linnet {name} " not in path.read_text(encoding="utf-8"):
        path = path.with_name(f"run-{name}.yaml")  # the folder was made by another command: keep its settings
    text = (
        f"# linnet {__version__}. To run this again, from the folder where it was first run:\n"
        f"#   linnet {name} --config {shlex.quote(str(path))}\n{plain_settings(settings.yaml)}"
    )
    write_text(path, text)


# Help


def _overview() -> str:
    """The text of `linnet --help`."""
    commands = [folded(f"  {name:<10}{Command.load(name).summary}", 10) for name in COMMANDS]
    return "\n".join(
        [
            "usage: linnet COMMAND [options]",
            "",
            folded(
                "Adapt a trained PyTorch network to new data in one solve, and ask what otherwise takes more "
                "training runs: uncertainty, influential samples, label errors, forgetting, more data.",
                0,
            ),
            "",
            "commands:",
            *commands,
            "",
            "options:",
            *(folded(f"  {option:<11}{text}", 11) for option, text in _OPTIONS.items()),
            "",
            "Start with `linnet demo`; `linnet doctor` says what works on this machine.",
        ]
    )


def _is_told(error: LinnetError) -> bool:
    """Whether the first process of several prints this error as well."""
    from linnet.distributed import is_shared

    return is_shared(error)


def _print_error(error: LinnetError, words: Sequence[str]) -> None:
    """Three short lines: what was wrong, what was expected, what to do."""
    name = next((word for word in words if word in COMMANDS), "adapt")
    names = {*Command.load(name).types, *Command.load("adapt").types}
    lines = [("error", error.what), ("expected", error.expected), ("to fix it", error.remedy)]
    for label, text in lines:
        if text:
            print(f"{label + ':':<11}{in_options(text, names)}", file=sys.stderr)


def in_options(text: str, names: Iterable[str]) -> str:
    """The library's arguments as options of the same name: ``memory="2GB"`` becomes ``--memory 2GB``."""
    mine = "|".join(sorted(names, key=len, reverse=True)) or "(?!)"
    text = re.sub(rf"(?:^|(?<=: ))({mine})(?= is )", lambda found: option(found[1]), text)

    def spelled(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        value = (found[2] or "").strip("'\"")
        return f"no {option(found[1])}" if value == "None" else f"{option(found[1])} {value}".rstrip()

    call = r"[\w.]+\([^()]*\)"  # such as linnet.linearize(net, params=...), which stays as it is
    value = r"'[^']*'|\"[^\"]*\"|[\w.+-]*[\w+-]"
    return re.sub(rf"{call}|(?<![\w.-])({mine})=({value})?", spelled, text)


def _unknown_command(name: str) -> InputError:
    """The error for a word that is no command."""
    if name.startswith("-"):
        return InputError(
            f"unknown option {name} before the command",
            expected="linnet COMMAND [options]",
            remedy="see linnet --help",
        )
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    return InputError(
        f"there is no command {name!r}",
        expected=f"one of {', '.join(COMMANDS)}",
        remedy=f"did you mean `linnet {close[0]}`?" if close else "see linnet --help",
    )


if __name__ == "__main__":
    sys.exit(main())
