"""Hooks of the site: notebooks, the changelog and the playground become pages, and links lead to pages.

A page of the site has a home in the repository: `docs/faq.md`, `notebooks/04_mpi.ipynb`, `CHANGELOG.md`. Its links lead
from there, as a reader of the repository follows them; on the site they lead to the page that the file became, or to
the repository where it became none.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
PYODIDE = Path(os.environ.get("RESHARD_NODE_MODULES", ROOT / ".venv" / "node" / "node_modules")) / "pyodide"
_FENCED_OR_LINK = re.compile(r"^```.*?^```\s*?$|\]\(([^)\s:]+)\)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(
    r'<h2 id="([\w.]+)" class="doc doc-heading">.*?<div class="doc doc-contents[^>]*>'
    r'(?:\s*<p class="doc doc-class-bases">.*?</p>)?\s*<p>(.*?)</p>(?:\s*<p>(.*?)</p>)?',
    re.DOTALL,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Where mike builds a version, its pages have the choice of versions; other builds have no list of them to load."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of other files."""
    for path, content in runpy.run_path(str(ROOT / "docs" / "playground.py"))["write_files"]().items():
        files.append(File.generated(config, path, content=content))
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, resources = MarkdownExporter().from_filename(str(path))
        for name, picture in resources["outputs"].items():
            text = text.replace(f"![png]({name})", f"![What the cell above draws]({path.stem}_{name})")
            files.append(File.generated(config, f"notebooks/{path.stem}_{name}", content=picture))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def _find_page(path: str) -> str:
    """The page that a file of the repository became, or its address there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ("README.md", "CHANGELOG.md"):
        return "index.md" if path == "README.md" else "changelog.md"
    return f"{path.removesuffix('.ipynb')}.md" if path.endswith(".ipynb") else ""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to the pages that their files became, and the page of benchmarks gets its records."""
    if page.file.src_uri == "benchmarks.md":
        markdown += "\n" + runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["list_records"]()
    here = page.file.src_uri
    home = {"changelog.md": "CHANGELOG.md"}.get(here, here if here.startswith("notebooks/") else f"docs/{here}")

    def lead(found: re.Match[str]) -> str:
        name, mark, anchor = (found[1] or "").partition("#")
        path = normpath(join(dirname(home), name))
        if not name or not (ROOT / path).exists():
            return found[0]
        to = _find_page(path)
        address = relpath(to, dirname(here) or ".") if to else f"{config.repo_url}/blob/main/{path}"
        return f"]({address}{mark}{anchor})"

    return _FENCED_OR_LINK.sub(lead, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page of the reference begins with a table of what it has, each with the first lines of its docstring; a table
    that is wider than the screen can be scrolled by the keyboard.
    """
    entries: list[list[str]] = [*map(list, _ENTRY.findall(html))] if "::: reshard" in (page.markdown or "") else []
    heads = ["name", "what it is"]
    if page.file.src_uri.endswith("errors.md"):
        heads = ["name", "what it means", "what to do"]
    rows = [
        heads,
        *([f'<a href="#{name}"><code>{name.rpartition(".")[2]}</code></a>', *words] for name, *words in entries),
    ]
    if entries:
        lines = ("".join(f"<td>{cell}</td>" for cell in row[: len(heads)]) for row in rows)
        table = f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>".replace("td>", "th>", 2 * len(heads))
        html = html.replace('<div class="doc doc-object', f'{table}<div class="doc doc-object', 1)
    around = '<div class="table" role="group" aria-label="table" tabindex="0"><table class="plain">'
    return re.sub(r"<table>(.*?</table>)", rf"{around}\1</div>", html, flags=re.DOTALL)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """The theme's search dialog gets a name, which screen readers say; no page asks elsewhere for the stars of the
    repository.
    """
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"').replace(' data-md-component="source"', "")


def on_post_build(*, config: MkDocsConfig) -> None:
    """The playground gets Python and this package, where npm has brought Pyodide."""
    if PYODIDE.exists():
        runpy.run_path(str(ROOT / "docs" / "playground.py"))["add_python"](
            Path(config.site_dir) / "playground", PYODIDE
        )
