"""The parser of the whole command: its own help, and every command in the order in which the help lists them."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

from reshard import __version__
from reshard.cli import file_commands, load_command, move_commands, program_commands, rank_commands
from reshard.cli.option_groups import NARROW, NOTATIONS, Command, argument
from reshard.errors import ReshardError, did_you_mean, quoted, shortened

_MOST_MESSAGE = 2000

_EXAMPLES = """\
examples:
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard doctor step.mlir

reshard COMMAND --help has more of them.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say where its help is, instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line, whatever it quotes, and exits with code 2."""
        message = shortened(" ".join(message.split()), _MOST_MESSAGE)
        self.exit(2, f"{self.prog.split()[0]}: error: {message} ({self.prog} --help says more)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a message; on stdout, what a full disk does not take is an error, which argparse would pass over."""
        if file is not sys.stdout:
            super()._print_message(message, file)
        else:
            print(message, end="", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Reads no layout and loads no library but the standard one."""
    top = _Parser(
        prog="reshard",
        description="The cheapest collectives that move an array\nfrom one sharded layout to another.",
        epilog=f"{NOTATIONS}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"reshard {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    for command in (
        *move_commands.COMMANDS,
        *program_commands.COMMANDS,
        *rank_commands.COMMANDS,
        *load_command.COMMANDS,
        *file_commands.COMMANDS,
        COMPLETION,
    ):
        summary, (group, _, name) = command.summary, command.name.rpartition(" ")
        if group and group not in groups:  # `files show`: a command of commands.
            about = file_commands.GROUP[1]
            described = textwrap.fill(f"{about[0].upper()}{about[1:]}.", NARROW)
            parser = commands.add_parser(group, help=about, description=described)
            groups[group] = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        parser = groups.get(group, commands).add_parser(
            name,
            help=summary,
            description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}.", NARROW),
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
    return top


def find_commands(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, of a command of commands as well: `files`, `files show`."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in top._actions:  # pyright: ignore[reportPrivateUsage]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            choices: dict[str, argparse.ArgumentParser] = dict(cast("Any", action).choices)
            for name, parser in choices.items():
                found |= {name: parser} | {f"{name} {inner}": each for inner, each in find_commands(parser).items()}
    return found


def parse_command(argv: Sequence[str] | None) -> Callable[[], int]:
    """The command that these arguments name, ready to run: calling it returns the exit code.

    Prints and exits for `--help`, `--version` and arguments that do not parse.
    """
    top = build_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    # `reshard help plan` and `reshard version`, as other commands have them.
    if words[:1] in (["help"], ["version"]):
        words = [*words[1:], f"--{words[0]}"]
    commands = find_commands(top)
    at = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    early = _check_option_names(top, words[:at])
    if at < len(words):
        # argparse would list all commands, and say of an option before its command only that it needs one.
        if early is not None:
            top.error(
                f"the option {quoted(early)} stands before the command; options follow it: {words[at]} {early} ..."
            )
        # A command of commands has the next word as well, unless that is an option.
        inner = words[at + 1 : at + 2] if any(each.startswith(f"{words[at]} ") for each in commands) else []
        name = " ".join((words[at], *(word for word in inner if not word.startswith("-"))))
        if name not in commands:
            known = ", ".join(commands)
            if words[at] == "files" and inner and Path(inner[0]).exists():
                top.error(f"there is no command {quoted(name)}; files show {inner[0]} shows what is stored there")
            top.error(f"there is no command {quoted(name)} among {known}{did_you_mean(name, commands)}")
        if name != "run":  # What follows a script is its own.
            _check_option_names(commands[name], words[at + 1 :])
    parsed, rest = top.parse_known_args(words)
    if rest and rest[0].startswith("-") and rest[0][1:2].isalpha():
        commands[words[at]].error(f"there is no option {quoted(rest[0])}")
    if rest:
        quotes = "; in a shell, put quotes around a layout: 'f32[{y}8, 16]'" if "[" in " ".join(words) else ""
        top.error(f"too many arguments: {' '.join(rest)}{quotes}")
    if parsed.verbose:
        level = logging.DEBUG if parsed.verbose > 1 else logging.INFO
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("reshard").setLevel(level)
    return parsed.call(parsed)


def _check_option_names(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """Exits for an unknown long option, and suggests the most similar one; else returns the first word that is not one
    of this parser's options.
    """
    known = [name for action in parser._actions for name in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    for word in words:
        name = word.partition("=")[0]
        if word == "--":
            break
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            parser.error(f"there is no option {quoted(name)}{did_you_mean(name, known)}")
    return next((word for word in words if word not in known), None)


# `reshard completion`: commands, options, files and presets for the Tab key of a shell, by shtab from the parser.

SHELLS = ("bash", "zsh", "fish")

_COMPLETION_EXAMPLES = """\
examples:
  eval "$(reshard completion bash)"   # in ~/.bashrc
  eval "$(reshard completion zsh)"    # in ~/.zshrc
  reshard completion fish \\
      > ~/.config/fish/completions/reshard.fish
"""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of `reshard completion`."""

    shell: str = argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def print_completion(options: CompletionOptions) -> int:
    """Prints the script that completes this command; raises `ReshardError` without shtab."""
    from reshard.synth.network import PRESETS

    try:
        shtab: Any = import_module("shtab")
    except ImportError as error:
        raise ReshardError(f"completion needs shtab, which cannot be imported ({error}): pip install shtab") from None
    top = build_parser()
    actions: list[Any] = [action for command in find_commands(top).values() for action in command._actions]  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        if action.metavar == "FILE":
            action.complete = shtab.FILE
        if "--network" in action.option_strings:
            action.choices = list(PRESETS)  # Of this parser, which parses nothing.
    print(shtab.complete(top, options.shell))
    return 0


COMPLETION = Command(
    "completion",
    "a script that completes this command in a shell",
    _COMPLETION_EXAMPLES,
    CompletionOptions,
    print_completion,
)
