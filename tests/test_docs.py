"""docs/*.md are executed, by the rules of test_examples; their links lead somewhere, and the invariants are there."""

import re
from pathlib import Path
from typing import Any

import pytest

from reshard.geometry.detect import read
from reshard.synth.network import PRESETS
from reshard.types import Layout, Mesh
from tests.test_examples import bin_folder as bin_folder
from tests.test_examples import console_problems, python_problems

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
LONG = {
    "python": ["jax.md", "proofs.md", "xla-pass.md"],
    "console": ["command.md", "doctor.md", "mpi.md", "pictures.md", "proofs.md"],
}  # slow
PASTED = ["quickstart-jax.md", "quickstart-plans.md", "quickstart-weights.md"]  # executed by tests/test_quickstarts.py
WITH_README = [ROOT / "README.md", *PAGES]
INVARIANTS = ["exact cover", "single use", "radix match", "canonical form", "one reduction", "whole sizes"]
_FENCED = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    marks = {page.name: [pytest.mark.slow] * (page.name in LONG[language]) for page in PAGES}
    executed = [page for page in PAGES if language == "console" or page.name not in PASTED]
    return [pytest.param(page, id=page.name, marks=marks[page.name]) for page in executed]


@pytest.mark.parametrize("page", pages("python"))
def test_python_blocks_do_what_they_say(page: Path):
    problems = python_problems(page.read_text(encoding="utf-8"))
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("page", pages("console"))
def test_commands_print_what_is_shown(page: Path, bin_folder: Path):
    problems = console_problems(page.read_text(encoding="utf-8"), bin_folder)
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("page", WITH_README, ids=names(WITH_README))
def test_links_lead_somewhere(page: Path):
    assert broken_links(page) == []


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {link for link in _LINK.findall(index) if "/" not in link} == {*names(PAGES)} - {"index.md"}


def test_every_invariant_has_its_bullet_and_a_refused_example():
    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    section = text.partition("## Invariants\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.*?)\*\*", section, re.MULTILINE) == INVARIANTS
    examples = re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    assert [part.partition("\n")[0] for part in examples] == INVARIANTS
    for part in examples:
        assert "\n>>> print(" in part
        assert "\n>>> refused(" in part


def cheat_sheet() -> list[list[str]]:
    """Per row the texts in JAX's, Shardy's and HLO's notation, DTensor's placements, and ours; "" if none."""
    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8").partition("## Cheat sheet\n")[2]
    rows = [line.strip("|").split("|")[1:] for line in text.splitlines() if line.startswith("|")]
    return [[(re.findall(r"`(.*?)`", cell) or [""])[0] for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("row", cheat_sheet(), ids=lambda row: row[-1])
def test_a_row_of_the_cheat_sheet_is_one_layout(row: list[str]):
    *others, placements, ours = row
    mesh = Mesh(x=4, y=2)
    layout = Layout.parse(ours, mesh)
    assert [read(text, mesh, layout.shape, "f32") for text in others if text] == [layout for text in others if text]
    if placements:
        each = re.split(r", (?![^(]*\))", placements)
        assert Layout.from_dtensor(each, mesh, layout.shape, "f32") == layout


def test_the_cheat_sheet_has_every_notation():
    columns = list(zip(*cheat_sheet(), strict=True))
    assert [sum(map(bool, column)) for column in columns] == [8, 8, 8, 6, 9]


def test_every_preset_is_in_the_table():
    text = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")
    table = text.partition("## Presets\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w\-]+)` \|", table, re.MULTILINE) == [*PRESETS]


def test_a_broken_link_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, long\n[a](#a-title-long) [b](#nothing) [c](none.md) [d](https://x.y/z)\n```\n[e](none)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#nothing", "none.md"]
