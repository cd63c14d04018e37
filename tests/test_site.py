"""The site has every page and every public name, and builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
import reshard.errors
import reshard.jax
import reshard.mpi

ROOT = Path(__file__).resolve().parent.parent
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def referenced(page: str) -> set[str]:
    """The names that a page of the reference has."""
    text = (ROOT / "docs" / "reference" / "api" / f"{page}.md").read_text(encoding="utf-8")
    return set(re.findall(r"^::: [\w.]*\.(\w+)$", text, re.MULTILINE))


def listed(package: object) -> set[str]:
    """The names in the table at the top of a package's docstring; a package that is listed has a page of its own."""
    table = re.sub(r"\([^)]*\)", "", package.__doc__ or "")
    names = re.findall(r"^    (\w+(?:, \w+)*) ", table, re.MULTILINE)
    return {name for line in names for name in line.split(", ")} - {"errors", "jax", "mpi", "names", "files", "draw"}


PACKAGES = {"reshard": reshard, "jax": reshard.jax, "mpi": reshard.mpi}


@pytest.mark.parametrize(("page", "package"), PACKAGES.items(), ids=PACKAGES)
def test_every_public_name_is_in_the_reference(page: str, package: object):
    assert len(listed(package)) > 5
    assert referenced(page) == listed(package)


def test_every_error_is_in_the_reference():
    errors = {
        name for name, one in vars(reshard.errors).items() if isinstance(one, type) and issubclass(one, Exception)
    }
    assert referenced("errors") == errors


def test_every_page_and_notebook_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r": ([\w/-]+\.(?:md|ipynb))$", CONFIG, re.MULTILINE)) == pages | notebooks


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    example = (tmp_path / "site" / "reference" / "api" / "reshard" / "index.html").read_text(encoding="utf-8")
    assert "reshard.plan_tree" in example and "<blockquote>" not in example
