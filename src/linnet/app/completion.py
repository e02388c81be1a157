"""Completion of commands, options and values in a shell."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from linnet.errors import InputError

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
