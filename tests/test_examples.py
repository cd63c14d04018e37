"""README.md is executed: its python blocks are run, and its console blocks compared with real output.

- A `python` block with `>>>` is a doctest; one without is run. All share their names, in order.
- In a `console` block each line beginning `$ ` is a command (a trailing backslash continues it) and
  the lines up to the next one are what it prints. Only `reshard` is run here; any other command
  (`$ make demo`, `$ pip install ...`) may not claim output.
- A command that fails shows its errors after its output, as a terminal does.
"""

import doctest
import os
import re
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the file on which the text begins."""

    language: str
    text: str
    line: int


class Command(NamedTuple):
    """A command, what the document says it prints, and its line."""

    command: str
    output: str
    line: int


def blocks(text: str, language: str) -> list[Block]:
    """The fenced blocks in that language."""
    fenced = [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]
    return [block for block in fenced if block.language == language]


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    listed: list[Command] = []
    continued = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        if continued:
            listed[-1] = listed[-1]._replace(command=f"{listed[-1].command}\n{line}")
        elif line.startswith("$ "):
            listed.append(Command(line[2:], "", number))
        elif listed:
            listed[-1] = listed[-1]._replace(output=f"{listed[-1].output}{line}\n")
        continued = line.endswith("\\") and (continued or line.startswith("$ "))
    return listed


def python_problems(text: str) -> list[str]:
    """What the python blocks of a document do other than it says."""
    problems: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text, "python"):
        where = f"line {block.line}"
        if ">>>" not in block.text:
            try:
                exec(compile(block.text, where, "exec"), names)
            except Exception:
                problems.append(f"{where}: {traceback.format_exc()}")
            continue
        example = doctest.DocTestParser().get_doctest(block.text, names, where, "README.md", block.line - 1)
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.REPORT_NDIFF)
        reports: list[str] = []
        runner.run(example, out=reports.append, clear_globs=False)
        names = example.globs
        if runner.failures:
            problems.append("".join(reports))
    return problems


def console_problems(text: str, bin_folder: Path) -> list[str]:
    """What the `reshard` commands of a document print other than it says."""
    problems: list[str] = []
    for block in blocks(text, "console"):
        for command, output, line in commands(block):
            if command.split()[:1] == ["reshard"]:
                shown = _trimmed(_shown(command, bin_folder))
                if shown != _trimmed(output):
                    problems.append(f"line {line}: $ {command}\nprints\n{shown}\nand not\n{_trimmed(output)}")
            elif output.strip():
                problems.append(f"line {line}: $ {command}\nis not run here, so its output belongs in a text block")
    return problems


def _shown(command: str, bin_folder: Path) -> str:
    """What a terminal of 100 columns shows of the command, without colour."""
    path = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "COLUMNS": "100", "TERM": "xterm"}
    env = {key: value for key, value in env.items() if key not in {"FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"}}
    run = subprocess.run(
        command, shell=True, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    return run.stdout + (run.stderr if run.returncode else "")


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).rstrip()


def _readme() -> str:
    path = ROOT / "README.md"
    assert path.exists(), "README.md is missing"
    return path.read_text(encoding="utf-8")


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder with the `reshard` command of pyproject.toml, run by this Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["reshard"].partition(":")
    script = tmp_path / "bin" / "reshard"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
    return script.parent


def test_readme_has_examples_of_both_kinds():
    readme = _readme()
    assert blocks(readme, "python")
    assert any(c.command.startswith("reshard ") for block in blocks(readme, "console") for c in commands(block))


def test_readme_python_blocks_do_what_they_say():
    problems = python_problems(_readme())
    assert not problems, "\n\n".join(problems)


def test_readme_commands_print_what_is_shown(bin_folder: Path):
    problems = console_problems(_readme(), bin_folder)
    assert not problems, "\n\n".join(problems)


def _fenced(language: str, text: str) -> str:
    return f"Words.\n\n```{language}\n{text}\n```\n"


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A `reshard` that prints its arguments and the width, or fails if its first argument is `fail`."""
    script = tmp_path / "reshard"
    script.write_text('#!/bin/sh\necho "$@ $COLUMNS  "\n[ "$1" != fail ] || { echo wrong >&2; exit 2; }\n')
    script.chmod(0o755)
    return tmp_path


def test_a_right_python_block_passes():
    text = _fenced("python", ">>> x = 2\n>>> x + 1\n3") + _fenced("python", "y = x") + _fenced("python", ">>> y\n2")
    assert python_problems(text) == []


@pytest.mark.parametrize("block", [">>> 1 + 1\n3", ">>> undefined", "raise ValueError('planted')"])
def test_a_wrong_python_block_is_found(block: str):
    (problem,) = python_problems(_fenced("python", "x = 1") + _fenced("python", block))
    assert "line 9" in problem


@pytest.mark.parametrize(
    "block",
    [
        "$ reshard a 'b c'\na b c 100",
        "$ reshard a \\\n    b\na b 100\n\n$ reshard c\nc 100\n",
        "$ reshard fail\nfail 100\nwrong",
        "$ make demo\n$ reshard x\nx 100",
        "$ reshard a | tr a b\nb 100",
    ],
)
def test_a_right_console_block_passes(block: str, echo: Path):
    assert console_problems(_fenced("console", block), echo) == []


@pytest.mark.parametrize(
    "block",
    [
        "$ reshard a\nb 100",
        "$ reshard a",
        "$ reshard a\na 100\nmore",
        "$ reshard a\n  a 100",
        "$ reshard fail\nfail 100",
        "$ make demo\nall is well",
    ],
)
def test_a_wrong_console_block_is_found(block: str, echo: Path):
    (problem,) = console_problems(_fenced("console", block), echo)
    assert problem.startswith("line 4: $ ")
