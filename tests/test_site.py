"""The site has every page and every public name, builds without a warning, and its playground plans.

The playground runs in headless Chromium with the real Pyodide, where both are on this machine; see playground.mjs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
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
    assert referenced(f"api/{page}") == listed(package)


def test_every_error_is_in_the_reference():
    errors = {
        name for name, one in vars(reshard.errors).items() if isinstance(one, type) and issubclass(one, Exception)
    }
    assert referenced("errors") == errors


def test_every_error_says_what_it_means_and_what_to_do():
    silent = {name for name in referenced("errors") if "\n\n" not in (getattr(reshard.errors, name).__doc__ or "")}
    assert silent == set()


def test_every_page_and_notebook_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    listed = re.findall(r": ([\w/-]+\.md)$", CONFIG, re.MULTILINE)
    assert sorted(listed) == sorted(pages | notebooks | {"changelog.md", "playground.md"})


NODE_MODULES = Path(os.environ.get("RESHARD_NODE_MODULES", Path(sys.prefix) / "node" / "node_modules"))
PYODIDE = shutil.which("node") is not None and (NODE_MODULES / "pyodide").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, with Pyodide if that is here."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "RESHARD_NODE_MODULES": str(NODE_MODULES) if PYODIDE else "none"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_every_entry_of_the_reference_is_what_it_is_in_python(site: Path):
    for page in (*(f"api/{name}" for name in (*PACKAGES, "files", "names")), "errors"):
        text = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
        entries = re.findall(r'doc doc-object doc-(\w+)">\s*<h2 id="[\w.]*\.(\w+)"', text)
        assert {name for _, name in entries} == referenced(page)
        assert "module" not in {kind for kind, _ in entries}
        assert all(f'<a href="#{name}' in text for name in re.findall(r'<h2 id="([\w.]+)"', text))
        assert "<blockquote>" not in text  # An example whose prompt was read as one.


@pytest.mark.slow
def test_notebooks_and_the_changelog_are_pages_whose_links_lead_to_pages(site: Path):
    first = (site / "notebooks" / "01_query_plans" / "index.html").read_text(encoding="utf-8")
    assert first.count('src="../01_query_plans_output') > 2
    assert "/blob/main/docs/" not in first + (site / "changelog" / "index.html").read_text(encoding="utf-8")
    assert not [path for path in site.rglob("*") if path.suffix in (".ipynb", ".md", ".py", ".pyc")]


WRONG = """<!doctype html><html lang="en"><title>t</title><body><main><article><h1>t</h1>
<a href="none/">gone</a> <a href="data.ipynb">a notebook</a> <a href="two/#nothing">two</a> <img src="two/a.svg">
<pre style="overflow: hidden; width: 80px">a line of code that is longer than its place</pre>
<div class="doc-object doc-module"><h2 class="doc-heading" id="f">f</h2><div class="doc-contents">Words.</div></div>
<div class="doc-object doc-function"><h2 class="doc-heading" id="g">g</h2></div>
<script src="https://elsewhere.example/a.js"></script></article></main></body></html>
"""
FOUND = """\
/: 1400 px, light: image-alt: <img src="two/a.svg">
/: 1400 px: pre is cut at 80 of
/: 400 px: pre is cut at 80 of
/: f is shown as a module
/: g has no docstring
/: g has no signature
/: loads https://elsewhere.example/a.js from elsewhere
/: the link "a notebook" downloads /data.ipynb
/: the link "gone" leads to /none/, which is not there
/: /two/ has no #nothing
/__pycache__/a.pyc: is published, and is no page
/data.ipynb: is published, and is no page
/three/index.html: is reached by no link
"""


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("node") and NODE_MODULES.exists()), reason="make docs brings what this needs")
def test_the_crawl_finds_what_is_wrong(tmp_path: Path):
    right = (
        '<!doctype html><html lang="en"><title>t</title><body><main><article><h1>t</h1></article></main></body></html>'
    )
    files = {"index.html": WRONG, "two/index.html": right, "three/index.html": right, "404.html": right}
    files |= {"data.ipynb": "{}", "__pycache__/a.pyc": "", "two/a.svg": '<svg xmlns="http://www.w3.org/2000/svg"/>'}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    env = {**os.environ, "RESHARD_NODE_MODULES": str(NODE_MODULES)}
    line = ["node", str(ROOT / "docs" / "crawl.mjs"), str(tmp_path)]
    crawl = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=False)
    if "no browser" in crawl.stdout:
        pytest.skip(crawl.stdout)
    *problems, last = crawl.stdout.splitlines()
    wanted = FOUND.splitlines()
    assert [problem for problem in problems if not problem.startswith(tuple(wanted))] == [], crawl.stderr
    assert [each for each in wanted if not any(problem.startswith(each) for problem in problems)] == []
    assert crawl.returncode == 1 and last.startswith("2 pages")


CONTROLS = ["example", "mesh", "source", "target", "budget", "network", "target_mesh", "shape", "dtype"]
CONTROLS += ["donate", "copy"]


@pytest.mark.slow
@pytest.mark.skipif(not PYODIDE, reason="make docs brings node's packages")
def test_the_playground_plans_as_a_person_types(site: Path):
    env = {**os.environ, "RESHARD_NODE_MODULES": str(NODE_MODULES)}
    line = ["node", str(ROOT / "tests" / "playground.mjs"), str(site)]
    run = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    if "no browser" in run.stdout:
        pytest.skip(run.stdout)
    checks = [(said["check"], said["value"]) for said in map(json.loads, run.stdout.splitlines())]
    one = dict(checks)
    assert one["errors"] == []
    assert one["first"] is True and one["mended"] is True
    assert [name for name in one["tabs"] if name in CONTROLS] == CONTROLS
    assert "14launches" in one["budget"] and "budget=4500" in one["link"]
    assert "f32[{y}8, 16, {x}4]}" in one["problem"]
    assert one["shared"] is True
    assert max(value for check, value in checks if check == "overflow") <= 0
