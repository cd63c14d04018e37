"""Runs the notebooks top to bottom, so that what they show is what they do.

    python notebooks/execute.py                  # all of them, in place: make notebooks
    python notebooks/execute.py 04_mpi           # one
    python notebooks/execute.py --check          # run, write nothing; 1 where something else comes out than is stored

Edit in Jupyter or in any editor, run this, commit. Every notebook gets a fresh kernel of this Python, in the folder of
the notebooks, and what is stored has nothing of the machine or the moment: no times, and cell ids that follow from the
text of the cell. Where a cell is tagged `varies`, what it prints may differ from run to run, and only the kinds of its
outputs are compared; so it is with pictures, but a notebook that has some names the `reshard/draw` that drew them, and
is run again when that has changed. Of HTML the words are compared.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import hashlib
import html
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(HERE.glob("[0-9][0-9]_*.ipynb")))
VARIES = "varies"
CELL_SECONDS = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_DRAW = sorted((HERE.parent / "reshard" / "draw").glob("*.py"))
DRAWN_BY = hashlib.sha256(b"".join(path.read_bytes() for path in _DRAW)).hexdigest()[:16]
_SETTINGS = ("COLUMNS", "IPYTHON", "JAX_", "JPY_", "MPL", "PYTEST_", "RESHARD_", "TF_", "TPU_", "XLA_")


def read(path: Path) -> NotebookNode:
    """A notebook from its file."""
    return nbformat.read(path, as_version=4)


def write(notebook: NotebookNode, path: Path) -> None:
    """The notebook as its file; raises `nbformat.ValidationError` for one that Jupyter would not open."""
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


# ---- running ---------------------------------------------------------------------------------------


class ThisPython(KernelSpecManager):
    """Every kernel is this Python, whatever is installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def executed(notebook: NotebookNode) -> NotebookNode:
    """A copy with the outputs of a run in a fresh kernel; raises `CellExecutionError` where a cell does."""
    fresh = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as scratch:
        # Sockets in a folder of its own: free ports may be taken before the kernel binds them.
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=ThisPython(),
            transport="ipc",
            connection_file=f"{scratch}/kernel.json",
        )
        client = NotebookClient(fresh, km=kernel, timeout=CELL_SECONDS, record_timing=False, coalesce_streams=True)
        client.execute(cwd=str(HERE), env=environment(scratch), cleanup_kc=True)
    return cleaned(fresh)


def environment(scratch: str) -> dict[str, str]:
    """The environment as if this Python's were activated, without settings that notebooks make themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    bin_folder = str(Path(sys.executable).parent)  # Not resolved: a virtual environment's Python is a link.
    return {
        **kept,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Another process of the tests may have it.
        "PATH": _joined(bin_folder, kept.get("PATH")),
        "PYTHONPATH": _joined(str(HERE.parent), kept.get("PYTHONPATH")),
        "IPYTHONDIR": f"{scratch}/ipython",
        "TMPDIR": scratch,
    }


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))


# ---- what is stored --------------------------------------------------------------------------------


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The same notebook, changed to what everybody would store for this run."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": sorted(cell.metadata.tags)} if cell.metadata.get("tags") else {})
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = output.text.replace("\r\n", "\n")  # Of commands, which write to a terminal.
            if "image/png" in output.get("data", {}):
                notebook.metadata["drawn_by"] = DRAWN_BY
    return notebook


# ---- what differs ----------------------------------------------------------------------------------


def differences(stored: NotebookNode, fresh: NotebookNode) -> list[str]:
    """The code cells whose fresh outputs are not the stored ones, each with what has changed."""
    differences: list[str] = []
    for at, (before, after) in enumerate(zip(_code(stored), _code(fresh), strict=True), 1):
        exact = VARIES not in before.metadata.get("tags", ())
        texts = [list(shown(cell, exact)) for cell in (before, after)]
        if texts[0] != texts[1]:
            first_line, _, _ = before.source.partition("\n")
            changed = difflib.unified_diff(*texts, "stored", "fresh", lineterm="")
            differences.append("\n".join([f"cell [{at}] {first_line}", *changed]))
    return differences


def shown(cell: NotebookNode, exact: bool = True) -> Iterator[str]:
    """What a cell shows, line by line: the kinds of its outputs, and with `exact` their text."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield f"{output.name}:"
            yield from output.text.splitlines() if exact else ()
            continue
        kinds = output.get("data", {"error": output.get("evalue", "")})
        picture = any(kind.startswith("image/") for kind in kinds)  # What text there is beside it says its size.
        for kind, data in sorted(kinds.items()):
            yield f"{kind}:"
            yield from _lines(kind, str(data)) if exact and not picture else ()


def _lines(kind: str, text: str) -> list[str]:
    """The words, line by line; of HTML those between the tags, whatever they look like."""
    if kind != "text/html":
        return text.splitlines()
    return [line for part in re.split(r"<[^>]*>", text) if (line := html.unescape(part).strip())]


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ---- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs notebooks; 1 if a cell fails, or with `--check` shows something else than is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="as in 04_mpi; all if none is given")
    parser.add_argument("--check", action="store_true", help="write nothing, and say what would change")
    options = parser.parse_args(arguments)
    known = {path.stem: path for path in NOTEBOOKS}
    if unknown := [name for name in options.names if name.removesuffix(".ipynb") not in known]:
        parser.error(f"there is no notebook {', '.join(unknown)}; there are {', '.join(known)}")
    paths = [known[name.removesuffix(".ipynb")] for name in options.names] or list(NOTEBOOKS)
    return int(any([_problem(path, options.check) for path in paths]))  # Every one is run.


def _problem(path: Path, check: bool) -> bool:
    stored = read(path)
    try:
        fresh = executed(stored)
    except CellExecutionError as error:
        print(f"{path.name} fails:\n{error}", file=sys.stderr)
        return True
    changed = differences(stored, fresh)
    cells = "cell" if len(changed) == 1 else "cells"
    print(f"{path.name}: {len(changed) or 'no'} {cells} changed", *changed, sep="\n")
    if check:
        return bool(changed)
    write(fresh, path)
    return False


if __name__ == "__main__":
    sys.exit(main())
