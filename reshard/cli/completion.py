"""`reshard completion`: commands, options and presets for the Tab key of a shell, read from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from reshard.cli.options import Commands, Options, add_command, options_of

_EXAMPLES = """\
examples:
  eval "$(reshard completion bash)"       # in ~/.bashrc
  eval "$(reshard completion zsh)"        # in ~/.zshrc, after compinit
  reshard completion fish > ~/.config/fish/completions/reshard.fish
"""

_BASH = """\
_reshard() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} last=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W {commands} -- "$word")); return; fi
  if [ "$last" = --network ]; then COMPREPLY=($(compgen -W {networks} -- "$word") $(compgen -f -- "$word")); return; fi
  case $word in
    -*) case ${{COMP_WORDS[1]}} in
{cases}
    esac ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -F _reshard reshard
"""


@dataclass(frozen=True)
class CompletionOptions(Options):
    """The options of `reshard completion`."""

    shell: str

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the name of the shell."""
        parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def add(commands: Commands) -> None:
    """Adds `reshard completion`."""
    summary = "a script that completes this command in a shell"
    what = partial(run, commands=commands)
    add_command(commands, "completion", summary, _EXAMPLES, CompletionOptions, what)


def run(options: CompletionOptions, commands: Commands) -> int:
    """Prints the script that completes these commands."""
    from reshard.synth.network import PRESETS

    names = {name: options_of(command) for name, command in commands.choices.items()}
    print(script(options.shell, names, list(PRESETS)), end="")
    return 0


def script(shell: str, commands: dict[str, list[str]], networks: list[str]) -> str:
    """The script of a shell, for commands with their options.

    >>> print(script("fish", {"plan": ["--budget"]}, []), end="")
    complete -c reshard -n __fish_use_subcommand -f -a plan
    complete -c reshard -n '__fish_seen_subcommand_from plan' -l budget
    """
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(commands, networks))
    cases = (f'      {name}) COMPREPLY=($(compgen -W {_words(own)} -- "$word")) ;;' for name, own in commands.items())
    bash = _BASH.format(commands=_words(commands), networks=_words(networks), cases="\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash}" if shell == "zsh" else bash


def _words(names: Iterable[str]) -> str:
    return shlex.quote(" ".join(names))


def _fish(commands: dict[str, list[str]], networks: list[str]) -> list[str]:
    lines = [f"complete -c reshard -n __fish_use_subcommand -f -a {name}" for name in commands]
    for command, options in commands.items():
        where = f"complete -c reshard -n '__fish_seen_subcommand_from {command}'"
        for option in options:
            more = f" -x -a {_words(networks)}" if option == "--network" else ""
            lines.append(f"{where} -l {option[2:]}{more}" if option.startswith("--") else f"{where} -s {option[1:]}")
    return lines
