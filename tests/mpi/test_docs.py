"""The script that docs/mpi.md shows is the one that it runs."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_script_is_shown_as_it_is():
    _, _, body = (DOCS / "mpi_pencils.py").read_text().partition("comm = MPI.COMM_WORLD\n")
    assert f"```text\ncomm = MPI.COMM_WORLD\n{body}```" in (DOCS / "mpi.md").read_text()
