"""`reshard completion`: commands, options, files and presets for the Tab key of a shell, by shtab from the parser."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from reshard.cli.options import Commands, Options, add_command
from reshard.errors import ReshardError

SHELLS = ("bash", "zsh", "fish")

_EXAMPLES = """\
examples:
  eval "$(reshard completion bash)"   # in ~/.bashrc
  eval "$(reshard completion zsh)"    # in ~/.zshrc
  reshard completion fish \\
      > ~/.config/fish/completions/reshard.fish
"""


@dataclass(frozen=True)
class CompletionOptions(Options):
    """The options of `reshard completion`."""

    shell: str

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the name of the shell."""
        parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def add(commands: Commands, top: argparse.ArgumentParser) -> None:
    """Adds `reshard completion`, which completes the command `top`."""
    summary = "a script that completes this command in a shell"
    add_command(commands, "completion", summary, _EXAMPLES, CompletionOptions, partial(run, commands=commands, top=top))


def run(options: CompletionOptions, commands: Commands, top: argparse.ArgumentParser) -> int:
    """Prints the script that completes this command; raises `ReshardError` without shtab."""
    from reshard.synth.network import PRESETS

    try:
        shtab: Any = import_module("shtab")
    except ImportError as error:
        raise ReshardError(
            f"completion needs shtab, which cannot be imported ({error}): pip install 'reshard[completion]'"
        ) from None
    actions: list[Any] = [action for command in commands.choices.values() for action in command._actions]  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        if action.metavar == "FILE":
            action.complete = shtab.FILE
        if "--network" in action.option_strings:
            action.choices = list(PRESETS)  # Of this parser, which parses nothing more.
    print(shtab.complete(top, options.shell))
    return 0
