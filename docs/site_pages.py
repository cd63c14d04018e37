"""Hooks of the site: notebooks and the playground become pages, and links out of `docs` lead to pages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the notebooks, and the playground's page and worker; `make playground` adds what it loads."""
    playground = runpy.run_path(str(ROOT / "docs" / "playground.py"))
    files.append(File.generated(config, "playground/index.html", content=playground["page"]()))
    files.append(File.generated(config, "playground/worker.js", content=playground["WORKER"]))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of `docs` lead to the pages that they are on the site, and the page of benchmarks gets its records."""
    if page.file.src_path == "benchmarks.md":
        markdown += "\n" + runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["list_records"]()
    markdown = markdown.replace("](../README.md)", "](tutorials/jax.md)")
    return re.sub(r"\]\((\.\./)+notebooks\)", "](/notebooks/01_query_plans.ipynb)", markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """The theme's search dialog gets a name, which screen readers say."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
