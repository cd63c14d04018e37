"""README.md is executed: its python blocks are run, and its console blocks compared with real output.

- `python` blocks are pasted into one interpreter, in order, line by line, as `python -i` reads them: without prompts,
  and with an empty line after an indented block. What they print is what a `text` block right after them says.
- In a `console` block each line beginning `$ ` is a command (a trailing backslash continues it) and
  the lines up to the next one are what it prints. Only `reshard` is run here; any other command
  (`$ make demo`, `$ pip install ...`) may not claim output.
- A command that fails shows its errors after its output, as a terminal does.

docs/*.md are executed by the same rules, their links lead somewhere, and the invariants are there. The quickstarts are
pasted as well, into an interpreter of their own that nobody has set up for them.
"""

from __future__ import annotations

import code
import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reshard.geometry.detect import read
from reshard.synth.network import PRESETS
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.sampling import for_each

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


class Pasted(code.InteractiveConsole):
    """An interpreter into which blocks are pasted, as `python -i` reads them: line by line, without prompts."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__"})
        self.complaints = ""

    def write(self, data: str) -> None:
        self.complaints += data

    def paste(self, block: Block) -> tuple[str, str]:
        """What it prints, and its complaints."""
        self.complaints, self.filename = "", f"line {block.line}"
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            for line in [*block.text.splitlines(), ""]:  # The empty line ends an indented block.
                self.push(line)
                if self.complaints:
                    break
        self.resetbuffer()
        return _trimmed(shown.getvalue()), self.complaints


def python_problems(text: str) -> list[str]:
    """What the python blocks of a document do other than it says, where they are pasted one after another."""
    problems: list[str] = []
    python = Pasted()
    printed = {block.line: block.text for block in blocks(text, "text")}
    environ = dict(os.environ)  # Pages say how many devices JAX has on the reader's machine.
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__
    for block in blocks(text, "python"):
        shown, complaints = python.paste(block)
        # What is printed stands in a text block right after: two fences and an empty line between them.
        said = printed.get(block.line + len(block.text.splitlines()) + 3)
        if complaints:
            problems.append(f"line {block.line}: {complaints}")
        elif said is not None and shown != _trimmed(said):
            problems.append(f"line {block.line}: prints\n{shown}\nand not\n{_trimmed(said)}")
    sys.excepthook = hook
    os.environ.clear()
    os.environ.update(environ)
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


def test_right_python_blocks_pass():
    text = _fenced("python", "x = 2\nfor _ in range(x):\n    x += 1\n\nx") + "\n```text\n4\n```\n"
    assert python_problems(text + _fenced("python", "y = (\n\n    x)") + _fenced("python", "assert y == 4")) == []


@pytest.mark.parametrize(
    "block",
    [
        ">>> 1 + 1\n2",
        "undefined",
        "raise ValueError('planted')",
        "print(x)\n```\n\n```text\n2",
        "for _ in range(x):\n    x += 1\nx",
        "def f():\n    y = 1\n\n    return y",
    ],
)
def test_a_wrong_python_block_is_found(block: str):
    (problem,) = python_problems(_fenced("python", "x = 1") + _fenced("python", block))
    assert problem.startswith("line 9: ")


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


# ---- docs/*.md -----------------------------------------------------------------------------------

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("api", "examples"))
LONG = {
    "python": ["reference/jax.md", "explanation/xla-pass.md", "how-to/which-shardings.md", "how-to/many-processes.md"],
    "console": [
        "reference/command.md",
        "reference/doctor.md",
        "explanation/mpi.md",
    ],
}  # slow
PASTED = [f"tutorials/{name}.md" for name in ("checkpoint", "jax", "plans", "weights")]
WITH_README = [ROOT / "README.md", *PAGES]
INVARIANTS = ["exact cover", "single use", "radix match", "canonical form", "one reduction", "whole sizes"]
_FENCED = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)).removeprefix("docs/") for path in paths]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    records = {
        record.stem for record in (ROOT / "benchmarks" / "results").glob("*.toml") if path.name == "benchmarks.md"
    }
    return records | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """The links of a page to files or headings that are not there; addresses are not looked up."""
    broken: list[str] = []
    for link in _LINK.findall(_FENCED.sub("", path.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        other = path if not name else path.parent / name
        if "://" not in link and (not other.exists() or (anchor and anchor not in anchors(other))):
            broken.append(link)
    return broken


def pages(language: str) -> list[Any]:
    """The pages as parameters, marked with what those with long examples of the language need."""
    executed = [(page, *names([page])) for page in PAGES]
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name in LONG[language]))
        for page, name in executed
        if language == "console" or name not in PASTED
    ]


@pytest.mark.parametrize("page", pages("python"))
def test_python_blocks_do_what_they_say(page: Path):
    problems = python_problems(page.read_text(encoding="utf-8"))
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("page", pages("console"))
def test_commands_print_what_is_shown(page: Path, bin_folder: Path):
    problems = console_problems(page.read_text(encoding="utf-8"), bin_folder)
    assert not problems, "\n\n".join(problems)


@for_each(WITH_README)
def test_links_lead_somewhere(page: Path):
    assert broken_links(page) == []


def test_every_invariant_has_its_bullet_and_an_example():
    text = (ROOT / "docs" / "reference" / "language.md").read_text(encoding="utf-8")
    section = text.partition("## Invariants\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.*?)\*\*", section, re.MULTILINE) == INVARIANTS
    assert re.findall(r"^(?:refused|print)\(.* # (.*)$", section, re.MULTILINE) == INVARIANTS


def cheat_sheet(section: str) -> list[list[str]]:
    """The cells of each row of the table in a section of the cheat sheet."""
    page = (ROOT / "docs" / "reference" / "cheat-sheet.md").read_text(encoding="utf-8")
    table = page.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in table if "|" in line and "`" in line]


def quoted(cell: str) -> list[str]:
    """The texts in backquotes."""
    return re.findall(r"`(.*?)`", cell)


@pytest.mark.parametrize("row", cheat_sheet("A dim"), ids=lambda row: row[0])
def test_a_dim_of_the_cheat_sheet_is_on_these_devices(row: list[str]):
    for dim in quoted(row[0]):
        layout = Layout.parse(f"f32[{dim}]", Mesh(x=4, y=2))
        held = (meaning(layout, device)[0][: layout.tile_shape_of(device)[0]] for device in (0, 2, 4, 6))
        assert "; ".join(",".join(map(str, indices)) or "-" for indices in held) == row[2]


@pytest.mark.parametrize("row", cheat_sheet("From others"), ids=lambda row: row[0])
def test_a_call_of_the_cheat_sheet_makes_its_layout(row: list[str]):
    mesh = Mesh(x=4, y=2)
    names = {"make": Layout, "mesh": mesh, "rest": (mesh, (16, 8), "f32")}
    assert [str(eval(call, names)) for call in quoted(row[1])] == quoted(row[2])


ROWS = [[(quoted(cell) or [""])[0] for cell in row[1:]] for row in cheat_sheet("One layout in every notation")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1])
def test_a_row_of_the_cheat_sheet_is_one_layout(row: list[str]):
    *others, placements, ours = row
    mesh = Mesh(x=4, y=2)
    layout = Layout.parse(ours, mesh)
    assert [read(text, mesh, layout.shape, "f32") for text in others if text] == [layout for text in others if text]
    if placements:
        each = re.split(r", (?![^(]*\))", placements)
        assert Layout.from_dtensor(each, mesh, layout.shape, "f32") == layout


def test_the_cheat_sheet_has_every_notation():
    columns = list(zip(*ROWS, strict=True))
    assert [sum(map(bool, column)) for column in columns] == [8, 8, 8, 6, 9]


def test_every_preset_is_in_the_table():
    text = (ROOT / "docs" / "explanation" / "networks.md").read_text(encoding="utf-8")
    table = text.partition("## Presets\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w\-]+)` \|", table, re.MULTILINE) == [*PRESETS]


def test_a_broken_link_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, long\n[a](#a-title-long) [b](#nothing) [c](none.md) [d](https://x.y/z)\n```\n[e](none)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#nothing", "none.md"]


# ---- the quickstarts by copy and paste -----------------------------------------------------------

UNSET = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def environment() -> dict[str, str]:
    """This environment without what the tests have set for jax."""
    own = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**own, "PYTHONPATH": str(ROOT), "TPU_SKIP_MDS_QUERY": "1", "PYTHON_BASIC_REPL": "1"}


def text(name: str) -> str:
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")


def paste(pasted: str, folder: Path) -> tuple[str, str]:
    """What a fresh `python -i` prints, and what it says of errors."""
    line = [sys.executable, "-i", "-q"]
    ran = subprocess.run(
        line, cwd=folder, env=environment(), input=pasted, capture_output=True, text=True, timeout=600, check=False
    )
    return ran.stdout, ran.stderr


def first_blocks() -> list[Any]:
    """The first block of each page that sets up JAX's devices, which the tests' own process has done already."""
    firsts = [
        (name, block)
        for page, name in zip(WITH_README, names(WITH_README), strict=True)
        for block in blocks(page.read_text(encoding="utf-8"), "python")[:1]
    ]
    return [pytest.param(block, id=name) for name, block in firsts if "jax" in block.text and name not in PASTED]


SETUP = """import os
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
"""


@pytest.mark.parametrize("block", first_blocks())
def test_the_first_block_sets_up_its_devices(block: Block):
    assert block.text.startswith(SETUP) or "subprocess" in block.text


@pytest.mark.parametrize(
    "name", ["plans", *(pytest.param(name, marks=pytest.mark.slow) for name in ("checkpoint", "jax", "weights"))]
)
def test_pasted_blocks_print_what_the_next_block_says(name: str):
    pasted = "\n".join(block.text for block in blocks(text(name), "python"))
    stdout, stderr = paste(pasted, ROOT)
    assert stdout == "".join(block.text for block in blocks(text(name), "text")), stderr
    assert "Traceback" not in stderr and "Error" not in stderr, stderr


@pytest.mark.parametrize("name", ["checkpoint", "jax", "plans", "weights", "mpi"])
def test_no_prompt_is_pasted_and_what_is_printed_follows_its_block(name: str):
    assert ">>>" not in text(name)
    if name != "mpi":
        languages = re.findall(r"^```(python|text)", text(name), re.MULTILINE)
        assert languages == ["python", "text"] * (len(languages) // 2)


@pytest.mark.slow
def test_the_script_for_ranks(tmp_path: Path):
    pytest.importorskip("mpi4py")
    (script,) = blocks(text("mpi"), "python")
    (tmp_path / "pencils.py").write_text(script.text, encoding="utf-8")
    line = [sys.executable, "-m", "reshard", "run", "-n", "4", "pencils.py"]
    ran = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
