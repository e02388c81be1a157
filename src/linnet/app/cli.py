"""Entry point of the command line: dispatch, option parsing, results and errors.

The options of a command are the parameters of its function (see `linnet.app.commands`), read by jsonargparse,
which adds `--config FILE` and `--print_config`. Nothing here imports torch, so that help answers at once.

Exit status: 0 done, 1 done with a negative answer (a check that fails), 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
import time
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from linnet import __version__
from linnet.app import commands
from linnet.app.commands import COMMANDS
from linnet.app.help import choices, completion, kind, page
from linnet.app.terminal import accept_any_character, folded, folding
from linnet.distribution import require_application, require_own_package
from linnet.errors import InputError, LinnetError

if TYPE_CHECKING:
    import jsonargparse

_FLAGS = {
    "--json": "Print the result as JSON, and nothing else, on standard output.",
    "--quiet": "Print errors alone, and the result where --json is given. Also -q.",
    "--verbose": "Show the settings in effect, progress at once and the time taken. Also -v.",
    "--traceback": "Show where in the program an error came from.",
    "--trust": "Run code named by a run folder or settings file from another user; see SECURITY.md.",
}
_OPTIONS = {
    "--help": "Show this page; linnet COMMAND --help shows its own",
    "--version": "Show the version",
    "-q, -v": "Say less, or more; before or after any command, as --json",
    "--completion SHELL": "Print what completes commands and options in bash, zsh or fish",
}
_SHORT = {"-q": "--quiet", "-v": "--verbose"}
_REPLAY = "run.yaml"
_SHARED = ("adapt",)  # commands of which every process that torchrun starts does a part
_RUNS = ("demo", "adapt", "forget", "update")  # commands that write a run into a folder of their own
_AUTO = "auto"  # the device of a machine that is not known yet
_NOTHING = object()
_SHOWN = 200  # characters of a value in an error


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
    if words[0] == "--completion":
        require_application("jsonargparse")
        print(completion(" ".join(words[1:]), {name: Command.load(name).completions() for name in COMMANDS}))
        return 0
    words = [_SHORT.get(word, word) for word in words]
    before = list(itertools.takewhile(_FLAGS.__contains__, words))  # a flag may stand before the command too
    name, options = "".join(words[len(before) : len(before) + 1]), [*words[len(before) + 1 :], *before]
    if not name or name in ("-h", "--help", "--version"):
        return _run([name or "--help"])
    if name not in COMMANDS:
        raise _unknown_command(name)
    require_own_package()
    # doctor says itself which packages are missing
    require_application(*(["jsonargparse"] if name == "doctor" else []))
    command = Command.load(name)
    if {"-h", "--help"} & set(options):
        print(command.help())
        return 0
    flags = {flag for flag in command.flags if flag in options}
    if {"--quiet", "--verbose"} <= flags:
        raise InputError("--quiet and --verbose contradict each other", remedy="give one of them")
    settings = command.parse([word for word in options if word not in flags])
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
        from linnet.app.runs.ranks import Group, Released

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
            *(folded(f"  {option:<20}{text}", 20) for option, text in _OPTIONS.items()),
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
    text = re.sub(rf"(?:^|(?<=: ))({mine})(?= is )", lambda found: _option(found[1]), text)

    def spelled(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        value = (found[2] or "").strip("'\"")
        return f"no {_option(found[1])}" if value == "None" else f"{_option(found[1])} {value}".rstrip()

    call = r"[\w.]+\([^()]*\)"  # such as linnet.linearize(net, params=...), which stays as it is
    value = r"'[^']*'|\"[^\"]*\"|[\w.+-]*[\w+-]"
    return re.sub(rf"{call}|(?<![\w.-])({mine})=({value})?", spelled, text)


def _option(name: str) -> str:
    """The option of a parameter."""
    return "--" + name.replace("_", "-")


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


# Options


@dataclass(frozen=True)
class CallOptions:
    """The options of one call: by parameter name, as the YAML that `--config` reads, and what was typed."""

    # `typed` holds the words beside a `--config`, such as `--shots=3`; None where there is no `--config`.

    values: dict[str, Any]
    yaml: str
    typed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Command:
    """A command: its name and the function whose signature is its command line."""

    name: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, name: str) -> Command:
        """The command of a name."""
        return cls(name, getattr(commands, f"{name}_command"))

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Call the function with the values of all options."""
        given = dict(values)
        records = {
            name: record(**{field.name: given.pop(field.name) for field in fields(record)})
            for name, record in self.records.items()
        }
        return self.function(**given, **records)

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """The types of the function's parameters."""
        return {name: kind for name, kind in get_type_hints(self.function).items() if name != "return"}

    @cached_property
    def records(self) -> dict[str, Any]:
        """The parameters that stand for the fields of a record."""
        return {name: kind for name, kind in self._parameters.items() if is_dataclass(kind)}

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types of the options, by name."""
        own = {name: kind for name, kind in self._parameters.items() if name not in self.records}
        return {k: v for record in self.records.values() for k, v in get_type_hints(record).items()} | own

    @property
    def flags(self) -> dict[str, str]:
        """The flags that commands share and this one takes, with their help."""
        names = {"model", "run"} & set(self.types)
        return {flag: text for flag, text in _FLAGS.items() if flag != "--trust" or names}

    def help(self) -> str:
        """The page that `linnet NAME --help` prints."""
        parser = self._parser()
        for flag, text in self.flags.items():
            parser.add_argument(flag, action="store_true", help=text)
        return page(parser, self.types)

    def completions(self) -> dict[str, tuple[str, ...]]:
        """The options with the words that may follow."""
        options = {
            _option(name): ("true", "false") if kind is bool else choices(kind)
            for name, kind in self.types.items()
            if name != "trust"
        }
        return {**options, **dict.fromkeys(["--config", "--help", *self.flags], ())}

    def parse(self, words: Sequence[str]) -> CallOptions:
        """Read the options."""
        parser, given = self._parser(), self._normalize(words)
        _check_configs(self.name, given)
        files = [word for word in given if word.startswith("--config")]
        typed = tuple(word for word in given if not word.startswith("--config"))
        try:
            found = parser.parse_args([*files, *typed])  # what is typed has the last word
        except ArgumentError as error:
            raise self._explain(str(error)) from None
        except (ValueError, RecursionError, OverflowError) as error:  # out of the reader of YAML
            raise InputError(
                f"an option cannot be read ({textwrap.shorten(str(error), 200)})",
                expected=f"the options of linnet {self.name}",
                remedy=f"linnet {self.name} --help shows every option",
            ) from error
        values = {name: getattr(found, name) for name in self.types if name != "trust"}
        return CallOptions(values, parser.dump(found), typed if files else None)

    def _parser(self) -> jsonargparse.ArgumentParser:
        """The parser of the function's signature."""
        import jsonargparse

        parser = jsonargparse.ArgumentParser(
            prog=f"linnet {self.name}", exit_on_error=False, allow_abbrev=False
        )
        # trust is a flag of the command line alone: no settings file can give it to itself
        for record in self.records.values():
            parser.add_class_arguments(record, as_group=False, skip={"trust"})
        parser.add_function_arguments(
            self.function, as_group=False, as_positional=False, skip={"trust", *self.records}
        )
        for action in parser._actions:
            action.help = self._help.get(action.dest, action.help)
        parser.add_argument(
            "--config",
            action="config",
            help="Read settings from a file, such as the run.yaml of an earlier run.",
        )
        return parser

    @property
    def _help(self) -> dict[str, str]:
        """What the docstrings of the function and its records say of each option."""
        import docstring_parser

        owners = [base for record in self.records.values() for base in reversed(record.__mro__)]
        texts = [docstring_parser.parse(inspect.getdoc(owner) or "") for owner in (*owners, self.function)]
        return {one.arg_name: one.description or "" for text in texts for one in text.params}

    def _normalize(self, words: Sequence[str]) -> list[str]:
        """Accept what people type: dashes in names, `--flag`, `--no-flag`, lists as words or with commas."""
        kinds = self.types
        result: list[str] = []
        queue = list(words)
        if "runs" in kinds:  # linnet compare OLD NEW
            bare = list(itertools.takewhile(lambda word: not word.startswith("-"), queue))
            queue = [*([f"--runs={json.dumps(bare)}"] if bare else []), *queue[len(bare) :]]
        while queue:
            word = queue.pop(0)
            option, equals, value = word.partition("=")
            name = option[2:].replace("-", "_")
            if not option.startswith("--") or option == "--":
                result.append(word)
                continue
            following = [value] if equals else []
            while not equals and queue and not queue[0].startswith("--"):
                following.append(queue.pop(0))
            if kinds.get(name) is bool and not following:
                result.append(f"--{name}=true")
            elif name.startswith("no_") and kinds.get(name[3:]) is bool and not following:
                result.append(f"--{name[3:]}=false")
            elif _is_list(kinds.get(name)) and following and following[0][:1] != "[":
                result.append(f"--{name}={_as_list(following, kinds[name])}")
            else:
                result += [f"--{name}={following[0]}" if following else f"--{name}", *following[1:]]
        return result

    def _explain(self, message: str) -> InputError:
        """A parser's message as what, expected and remedy."""
        parameters = self.types
        shown = f"linnet {self.name} --help shows every option"
        if match := re.match(r"unrecognized arguments: (\S+)|Option '(\S+)' is not accepted", message):
            word = (match[1] or f"--{match[2]}").partition("=")[0]
            options = [_option(name) for name in parameters]
            close = difflib.get_close_matches(_option(word.lstrip("-")), options, n=1)
            return InputError(
                f"there is no option {word}" if word.startswith("-") else f"unexpected word {word!r}",
                expected=f"the options of linnet {self.name}",
                remedy=f"did you mean {close[0]}?" if close else shown,
            )
        if match := re.match(r"the following arguments are required: (.*)", message):
            missing = [_option(name) for name in match[1].split(", ")]
            text = " and ".join(missing)
            return InputError(
                f"{text} must be given", expected=f"linnet {self.name} {text} ...", remedy=shown
            )
        if match := re.match(r"argument (\S+): expected one argument", message):
            word = _option(match[1].lstrip("-"))
            return InputError(f"{word} has no value", expected=f"a value after {word}", remedy=shown)
        key = re.match(r'Parser key "(\w+)"', message)
        given = re.search(r"(?:Given|Got) value: (.*)", message)
        if key and given and key[1] in parameters:
            option, annotation = _option(key[1]), self.types[key[1]]
            close = difflib.get_close_matches(given[1], choices(annotation), n=1)
            return InputError(
                f"{option} is {given[1][:_SHOWN]!r}",
                expected=kind(annotation),
                remedy=f"did you mean {option} {close[0]}?" if close else shown,
            )
        if "--config" in message or "Problems parsing config" in message or 'key "config"' in message:
            absent = "o such file" in message or "not exist" in message
            reason = "there is no such file" if absent else "it is no YAML that can be read"
            file = re.search(r"[^\s'\"]+\.ya?ml", message)
            return InputError(
                f"--config{f' {file[0]}' if file else ''} cannot be used: {reason}",
                expected="a file of settings, such as the run.yaml of an earlier run",
                remedy=f"linnet {self.name} ... --print_config shows what such a file holds",
            )
        return InputError(
            textwrap.shorten(message, 300), expected=f"the options of linnet {self.name}", remedy=shown
        )


def _check_configs(command: str, words: Sequence[str]) -> None:
    """Look through the files of settings before they are read; text in place of a file is the user's own."""
    for word in words:
        name, _, value = word.partition("=")
        if name == "--config" and os.path.lexists(value):
            from linnet.app.settings_file import check_settings

            check_settings(command, value)


def _is_list(kind: Any) -> bool:
    """Whether an option takes several values."""
    return get_origin(kind) is list or any(get_origin(part) is list for part in get_args(kind))


def _as_list(words: Sequence[str], kind: Any) -> str:
    """Words, or words with commas, as a YAML list."""
    items = [item for word in words for item in word.split(",") if item]
    return json.dumps(items) if "list[str]" in str(kind) else f"[{', '.join(items)}]"


if __name__ == "__main__":
    sys.exit(main())
