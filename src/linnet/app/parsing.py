"""The options of a command: its function's parameters, read from words and settings files by their types.

A settings file is a few lines of YAML. Its events come one at a time, so that it is judged without being
built: one that grows, nests or never ends is refused.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from linnet.app import commands
from linnet.app.options import listed
from linnet.app.terminal import folded
from linnet.errors import InputError

FLAGS = {
    "--json": "Print the result as JSON, and nothing else, on standard output.",
    "--quiet": "Print errors alone, and the result where --json is given. Also -q.",
    "--verbose": "Show the settings in effect, progress at once and the time taken. Also -v.",
    "--traceback": "Show where in the program an error came from.",
    "--trust": "Run code named by a run folder or settings file from another user; see SECURITY.md.",
}
_GENERAL = {
    "--help": "Show this help message and exit. Also -h.",
    "--print_config": "Print the settings, as --config reads them, and exit.",
}
_CONFIG = "Read settings from a file, such as the run.yaml of an earlier run."
# Type -> how usage shows a value, and how an error describes it. Others are shown by the option's own name.
_KINDS: dict[object, tuple[str, str]] = {
    int: ("N", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("", "text"),
    bool: ("{true,false}", "true or false"),
    Path: ("PATH", "a path"),
    dict: ("JSON", "a JSON object"),
    list: ("", "a list"),
}
_SHOWN = 200  # characters of a value in an error
_WROTE = re.compile(r"# linnet [^\n]*\n#   linnet ([a-z]+) --config ")  # the head of a run's own settings
_LARGEST = 1 << 18  # bytes of settings; those of a run take one kilobyte
_DEEPEST = 50  # lists and mappings in each other; the reader calls itself once for each
_TOO_DEEP = f"has more than {_DEEPEST} lists or mappings inside each other"
_DIGITS = 400  # of a number; those beyond 1e308 are none


# Types


def _members(annotation: object) -> list[Any]:
    """The types that a union consists of; the type itself where it is none."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return list(get_args(annotation)) if is_union else [annotation]


def choices(annotation: object) -> tuple[str, ...]:
    """The words that an option accepts."""
    parts = _members(annotation)
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))


def _described(annotation: object) -> tuple[str, str]:
    """How usage shows a value, by nothing where the option's name says more; and a type in words."""
    parts = [get_origin(part) or part for part in _members(annotation)]
    others = [_KINDS[part] for part in parts if part not in (Literal, type(None))]
    words, names = choices(annotation), [name for name, _ in others if name]
    told = [*(text for _, text in others), *words]
    in_words = " or ".join(filter(None, [", ".join(told[:-1]), told[-1]]))
    return f"{{{','.join([*words, *names])}}}" if words else "".join(names[:1]), in_words


def _converted(value: Any, annotation: object) -> Any:
    """A word, or a value out of a settings file, as one of a type; ValueError where it is none."""
    parts = _members(annotation)
    if value is None or value == "null":
        if type(None) in parts:
            return None
        raise ValueError(value)
    for part in parts:
        origin = get_origin(part) or part
        if origin is Literal and value in get_args(part):
            return value
        if origin is list:
            items = value if isinstance(value, list) else json.loads(value)
            return [_converted(item, get_args(part)[0]) for item in items]
        if origin is dict:
            found = json.loads(value) if isinstance(value, str) else value
            if isinstance(found, dict):
                return found
        # of a settings file, 1.50 and yes are words in quotes alone
        if origin in (str, Path) and isinstance(value, str | int) and not isinstance(value, bool):
            return origin(str(value))
        if origin is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if origin in (int, float) and isinstance(value, str | origin | int) and not isinstance(value, bool):
            try:
                number = origin(value)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    raise ValueError(value)


# Commands


@dataclass(frozen=True)
class CallOptions:
    """The options of one call: by parameter name, and those of them that were typed beside a ``--config``."""

    values: dict[str, Any]
    typed: dict[str, Any] | None = None  # None where there is no `--config`

    @property
    def yaml(self) -> str:
        """The settings as ``--config`` reads them."""
        import yaml

        given = {name: value for name, value in self.values.items() if value is not None}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=math.inf)
        return text


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
            for name, record in self._records.items()
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
    def _records(self) -> dict[str, Any]:
        """The parameters that stand for the fields of a record."""
        return {name: kind for name, kind in self._parameters.items() if is_dataclass(kind)}

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types of all that the function is called with, by name."""
        own = {name: kind for name, kind in self._parameters.items() if name not in self._records}
        return {k: v for record in self._records.values() for k, v in get_type_hints(record).items()} | own

    @cached_property
    def options(self) -> dict[str, Any]:
        """The types of the options: trust is a flag, so that no settings file can give it to itself."""
        return {name: kind for name, kind in self.types.items() if name != "trust"}

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """What options are where they are not given; those that must be are left out."""
        owners = (*self._records.values(), self.function)
        every = [p for owner in owners for p in inspect.signature(owner).parameters.values()]
        return {p.name: p.default for p in every if p.default is not inspect.Parameter.empty}

    @property
    def flags(self) -> dict[str, str]:
        """The flags that commands share and this one takes, with their help."""
        names = {"model", "run"} & set(self.types)
        return {flag: text for flag, text in FLAGS.items() if flag != "--trust" or names}

    def help(self) -> str:
        """The page that `linnet NAME --help` prints."""
        parser = argparse.ArgumentParser(prog=f"linnet {self.name}", add_help=False, allow_abbrev=False)
        owners = [base for record in self._records.values() for base in reversed(record.__mro__)]
        texts = {name: text for owner in (*owners, self.function) for name, text in _arguments(owner).items()}
        for name in sorted(self.options, key=self._defaults.__contains__):
            default = self._defaults.get(name)
            end = "" if default is None else f" (default: {default})"
            parser.add_argument(
                option(name),
                metavar=_described(self.options[name])[0] or name.upper(),
                required=name not in self._defaults,
                help=texts[name].replace("%", "%%") + (end if name in self._defaults else " (required)"),
            )
        parser.add_argument("--config", metavar="FILE", help=_CONFIG)
        for flag, text in {**_GENERAL, **self.flags}.items():
            parser.add_argument(flag, action="store_true", help=text)
        return "\n".join(folded(line, 0) for line in parser.format_help().rstrip().split("\n"))

    # Words

    def parse(self, words: Sequence[str], is_whole: bool = True) -> CallOptions:
        """Read the options; what is typed has the last word."""
        typed: dict[str, Any] = {}
        from_files: dict[str, Any] = {}
        files = False
        for name, key, given in self._split(words):
            if name == "config" and given:
                from_files |= self._read_settings(given[0])
                files = True
            elif key:
                typed[name] = {**typed.get(name, {}), key: _plain(given[0] if given else "")}
            elif name in typed and _may_repeat(self.options[name]):
                typed[name] = [*listed(typed[name]), self._value(name, given)]
            elif name in typed and name == "model":
                text = f"{option(name)} is given twice"
                raise InputError(text, f"one network for linnet {self.name}", "leave all but one out")
            else:
                typed[name] = self._value(name, given)
        values: dict[str, Any] = {name: self._defaults.get(name) for name in self.options} | from_files
        for name, value in typed.items():
            is_part = isinstance(value, dict) and isinstance(values.get(name), dict)
            values[name] = {**values[name], **value} if is_part else value
        missing = [
            option(name) for name in self.options if name not in {*self._defaults, *from_files, *typed}
        ]
        if missing and is_whole:
            text = " and ".join(missing)
            raise InputError(f"{text} must be given", f"linnet {self.name} {text} ...", self._page)
        return CallOptions(values, typed if files else None)

    def _split(self, words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
        """Each option that is typed: its name, a key behind a dot, and the words that follow."""
        queue = list(words)
        if "runs" in self.options:  # linnet compare OLD NEW
            bare = list(itertools.takewhile(lambda word: not word.startswith("-"), queue))
            queue = queue[len(bare) :]
            if bare:
                yield "runs", "", [json.dumps(bare)]  # a folder's name may hold a comma
        while queue:
            word = queue.pop(0)
            typed, equals, value = word.partition("=")
            name, _, key = typed[2:].replace("-", "_").partition(".")
            following = [value] if equals else []
            while not equals and queue and not queue[0].startswith("--"):
                following.append(queue.pop(0))
            if name.startswith("no_") and self.options.get(name[3:]) is bool and not following:
                name, following = name[3:], ["false"]
            if not word.startswith("--") or not (name in self.options or name == "config"):
                self._refuse_name(typed)
            if len(following) > 1 and not _is_list(self.options.get(name)):
                self._refuse_name(following[1])
            yield name, key, following

    def _value(self, name: str, given: Sequence[str]) -> Any:
        """What the words behind an option stand for."""
        annotation = self.options.get(name)
        if annotation is bool and not given:
            return True
        if not given:
            raise InputError(f"{option(name)} has no value", f"a value after {option(name)}", self._page)
        if _is_list(annotation) and given[0][:1] != "[":
            return self._convert(name, [item for word in given for item in word.split(",") if item])
        return self._convert(name, given[0])

    def _convert(self, name: str, value: Any) -> Any:
        """A value in the type of an option."""
        annotation = self.options[name]
        try:
            return _converted(value, annotation)
        except (ValueError, TypeError, RecursionError) as error:
            shown = str(value)[:_SHOWN]
            close = difflib.get_close_matches(shown, choices(annotation), n=1)
            raise InputError(
                f"{option(name)} is {shown!r}",
                expected=_described(annotation)[1],
                remedy=f"did you mean {option(name)} {close[0]}?" if close else self._page,
            ) from error

    def _refuse_name(self, word: str) -> NoReturn:
        """Raise the error for a word that is no option."""
        close = difflib.get_close_matches(word, map(option, self.options), n=1)
        raise InputError(
            f"there is no option {word}" if word.startswith("-") else f"unexpected word {word!r}",
            expected=f"the options of linnet {self.name}",
            remedy=f"did you mean {close[0]}?" if close else self._page,
        )

    @property
    def _page(self) -> str:
        """Where the options are explained."""
        return f"linnet {self.name} --help shows every option"

    # Settings files

    def _read_settings(self, file: str) -> dict[str, Any]:
        """The settings in a file."""
        import yaml

        path = Path(file)
        text = _settings_text(self.name, path)
        try:
            _check_events(path, yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
            found = yaml.safe_load(text)
        except InputError:
            raise
        except (yaml.YAMLError, ValueError) as error:
            if "nesting depth" in str(error):  # libyaml of PyYAML 6.0.4 ends there by itself
                _refuse(path, _TOO_DEEP, "plain settings")
            _refuse(path, "is no YAML that can be read", "a file of settings")
        if not isinstance(found, dict):
            _refuse(path, "holds no settings by name", "lines such as seed: 1")
        named = {str(name).replace("-", "_"): value for name, value in found.items()}
        for name in named:
            if name not in self.options:
                self._refuse_name(option(name))
        return {name: self._convert(name, value) for name, value in named.items()}


def option(name: str) -> str:
    """The option of a parameter."""
    return "--" + name.replace("_", "-")


def _is_list(annotation: object) -> bool:
    """Whether an option takes several values."""
    return any(get_origin(part) is list for part in _members(annotation)) and not _may_repeat(annotation)


def _may_repeat(annotation: object) -> bool:
    """Whether an option takes one value, or more where it is given more than once."""
    parts = _members(annotation)
    return str in parts and list[str] in parts


def _plain(word: str) -> Any:
    """A word as JSON, or as text."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _arguments(owner: object) -> dict[str, str]:
    """What a docstring says of each argument."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(owner) or "").partition("Args:\n")[2].splitlines():
        if begins := re.match(r"    (\w+): (.*)", line):
            name = begins[1]
            found[name] = begins[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return {name: text.replace("``", "") for name, text in found.items()}


def _settings_text(command: str, path: Path) -> str:
    """The text of a file of settings, of this command and not too long."""
    from linnet.files import require_file

    if not path.exists():
        _refuse(path, "cannot be used: there is no such file", "a file of settings")
    require_file(path)
    if path.stat().st_size > _LARGEST:
        _refuse(path, f"has {path.stat().st_size:,} bytes", f"at most {_LARGEST:,} bytes of settings")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _refuse(path, "is no text in UTF-8", "a file of settings in YAML")
    wrote = _WROTE.match(text)
    if wrote and wrote[1] != command:
        raise InputError(
            f"--config {path} holds the settings of linnet {wrote[1]}",
            expected=f"settings of linnet {command}",
            remedy=f"run linnet {wrote[1]} --config {path}",
        )
    return text


def _check_events(path: Path, events: Any) -> None:
    """Require values that are written out, not deep, and no number that Python cannot read."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("SequenceStartEvent", "MappingStartEvent")
        depth -= kind in ("SequenceEndEvent", "MappingEndEvent")
        if depth > _DEEPEST:
            _refuse(path, _TOO_DEEP, "plain settings")
        if kind == "AliasEvent":  # a few of them can stand for any number of values
            _refuse(path, f"repeats a value by the alias *{event.anchor}", "settings without aliases")
        digits = getattr(event, "value", "").lstrip("+-").replace("_", "")
        if len(digits) > _DIGITS and digits.isdigit():
            _refuse(path, f"holds a number of {len(digits):,} digits", "numbers below 1e308")


def _refuse(path: Path, what: str, expected: str) -> NoReturn:
    """Raise."""
    raise InputError(
        f"--config {path} {what}", expected, "use the run.yaml of a run, or what --print_config shows"
    )
