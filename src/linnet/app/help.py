"""Help pages of the command line: options, their types and choices."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from linnet.app.terminal import folded

if TYPE_CHECKING:
    from argparse import Action

    import jsonargparse

# Type -> how usage shows a value, and how an error describes it. Others are shown by the option's own name.
_KINDS: dict[object, tuple[str, str]] = {
    int: ("N", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("", "text"),
    bool: ("{true,false}", "true or false"),
    Path: ("PATH", "a path"),
    dict: ("JSON", "a JSON object"),
}


def _members(annotation: object) -> list[object]:
    """The types that a union consists of, without None; the type itself where it is none."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for part in get_args(annotation) if part is not type(None)]
    return [annotation]


def choices(annotation: object) -> tuple[str, ...]:
    """The words that an option accepts."""
    parts = _members(annotation)
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))


def kind(annotation: object) -> str:
    """A type in words."""
    words = list(choices(annotation))
    others = [part for part in _members(annotation) if get_origin(part) is not Literal]
    words = [_KINDS.get(get_origin(part) or part, ("", str(part)))[1] for part in others] + words
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def value_name(annotation: object) -> str | None:
    """Placeholder of the value in usage and help."""
    words = list(choices(annotation))
    others = [part for part in _members(annotation) if get_origin(part) is not Literal]
    names = [_KINDS.get(get_origin(part) or part, ("", ""))[0] for part in others]
    if words:
        return f"{{{','.join([*words, *filter(None, names)])}}}"
    return names[0] or None


def page(parser: jsonargparse.ArgumentParser, hints: Mapping[str, Any]) -> str:
    """The help of a command."""
    import jsonargparse

    class Formatter(jsonargparse.DefaultHelpFormatter):
        """Leaves out the types, which the names of the values tell, and defaults that are none."""

        def _get_help_string(self, action: Action) -> str:
            text = re.sub(r"type: %\(type\)s(, )?", "", super()._get_help_string(action) or "")
            if action.default is None or action.nargs == 0:
                text = re.sub(r"(, )?default: %\(default\)s", "", text)
            return text.replace(" ()", "").replace(", )", ")")

    parser.formatter_class = Formatter
    for actions in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        actions.sort(key=lambda action: not action.required)
    for action in parser._actions:
        action.option_strings = [word for word in action.option_strings if not word.endswith("+")]
        if action.dest == "print_config":
            action.nargs, action.help = 0, "Print the settings, as --config reads them, and exit."
        if action.dest in hints:
            action.metavar = value_name(hints[action.dest]) or action.dest.upper()
    text = parser.format_help().replace("``", "")
    text = re.sub(r"--(?!print_config)[a-z_]+", lambda match: match[0].replace("_", "-"), text).rstrip()
    return "\n".join(folded(line, 0) for line in text.split("\n"))  # headings are not
