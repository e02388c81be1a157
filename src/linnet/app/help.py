"""Help pages of the command line, and the completion of commands, options and values in a shell."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from linnet.app.terminal import folded
from linnet.errors import InputError

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


# Completion

Options = Mapping[str, tuple[str, ...]]
GENERAL = ("--help", "--version", "--completion")  # in place of a command

_BASH = """\
_linnet() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local words="{commands}" values=""
    [ "${{word:0:1}}" = "-" ] && words="{general}"
    [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{options}
        *) words="" ;;
    esac
    [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    [ "$COMP_CWORD" -eq 2 ] && [ "$before" = "--completion" ] && values="{shells}"
    if [ -n "$values" ]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    elif [ "$COMP_CWORD" -eq 1 ] || [ "${{word:0:1}}" = "-" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=()  # a path, as the shell completes it
    fi
}}
complete -o default -F _linnet linnet"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_TO_USE = {
    "bash": 'eval "$(linnet --completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(linnet --completion zsh)" in ~/.zshrc, after compinit',
    "fish": "linnet --completion fish | source, in ~/.config/fish/config.fish",
}


def completion(shell: str, commands: Mapping[str, Options]) -> str:
    """The script that completes the command line in a shell."""
    if shell not in _TO_USE:
        close = difflib.get_close_matches(shell, _TO_USE, n=1)
        raise InputError(
            f"--completion is {shell!r}" if shell else "--completion names no shell",
            expected="bash, zsh or fish",
            remedy=f"did you mean --completion {close[0]}?" if close else "linnet --completion bash",
        )
    script = _fish(commands) if shell == "fish" else _ZSH * (shell == "zsh") + _bash(commands)
    return f"# To use it: {_TO_USE[shell]}\n{script}"


def _bash(commands: Mapping[str, Options]) -> str:
    """One function, which zsh can run as well."""
    options = [f'        {name}) words="{" ".join(known)}" ;;' for name, known in commands.items()]
    values = [
        f'        "{name} {option}") values="{" ".join(words)}" ;;'
        for name, known in commands.items()
        for option, words in known.items()
        if words
    ]
    return _BASH.format(
        commands=" ".join(commands), general=" ".join(GENERAL), shells=" ".join(_TO_USE),
        options="\n".join(options), values="\n".join(values),
    )  # fmt: skip


def _fish(commands: Mapping[str, Options]) -> str:
    """One line for each command and option."""
    lines = [f"complete -c linnet -f -n __fish_use_subcommand -a '{' '.join(commands)}'"]
    for option in GENERAL:
        shells = f" -xa '{' '.join(_TO_USE)}'" if option == "--completion" else ""
        lines.append(f"complete -c linnet -n __fish_use_subcommand -l {option.removeprefix('--')}{shells}")
    for name, options in commands.items():
        for option, words in options.items():
            choices = f" -xa '{' '.join(words)}'" if words else ""
            condition = f"-n '__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c linnet {condition} -l {option.removeprefix('--')}{choices}")
    return "\n".join(lines)
