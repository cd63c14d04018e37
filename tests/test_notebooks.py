"""The notebooks run top to bottom and show what they did: outputs are compared with those that are stored.

The stored outputs are those of jax 0.12; XLA's own figures differ between its versions. Under another jax, also one
without a hook for compiler passes, the notebooks must still run, with all that they assert. Pictures, and cells tagged
`varies`, must be there, no more.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import reshard
from notebooks import execute
from tests.test_docs import broken_links, names

STORED_WITH = "0.12."
NOTEBOOKS = execute.NOTEBOOKS
MACHINE = re.compile(r"(?<![\w.~-])/(?:tmp|work|root|home|var|opt|usr|srv|mnt|Users|private)\b|~/|\b[A-Z]:\\")
MARKS = {"colour codes": "\x1b", "a traceback": "Traceback (most recent call last)"}
REGISTRY = re.compile(r"pypi|index-url|files\.pythonhosted|artifactory|proxy", re.IGNORECASE)


def problems(notebook: NotebookNode) -> list[str]:
    """What must not be stored."""
    faults: list[str] = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if (counts := [cell.execution_count for cell in code]) != list(range(1, len(code) + 1)):
        faults.append(f"the cells were not run once from top to bottom: {counts}")
    for at, cell in enumerate(code, 1):
        text = "\n".join(execute.shown(cell))
        kinds = [output.get("name", output.output_type) for output in cell.outputs]
        faults += [f"cell [{at}] has {kind} output" for kind in kinds if kind in ("error", "stderr")]
        faults += [f"cell [{at}] shows a path or host: {m[0]}" for p in (MACHINE, REGISTRY) for m in p.finditer(text)]
        faults += [f"cell [{at}] has {what}" for what, mark in MARKS.items() if mark in text]
    if execute.cleaned(nbformat.from_dict(notebook)) != notebook:
        faults.append("it was not written by notebooks/execute.py; run make notebooks")
    return faults


def test_they_are_all_here():
    stems = [path.stem for path in NOTEBOOKS]
    assert stems == [
        "01_query_plans",
        "02_xla_pass",
        "03_memory_guarantees",
        "04_mpi",
        "05_users_cases",
        "06_weights_to_a_server",
        "07_which_shardings",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(list(NOTEBOOKS)))
def test_it_runs_and_shows_what_is_stored(path: Path):
    stored = execute.read(path)
    fresh = execute.executed(stored)
    assert problems(fresh) == []  # Also what no cell raises: a command that fails.
    if version("jax").startswith(STORED_WITH):
        changed = execute.differences(stored, fresh)
        assert not changed, "\n\n".join(["run `make notebooks` if this is what it should show", *changed])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(list(NOTEBOOKS)))
def test_what_is_stored_is_of_one_clean_run(path: Path):
    assert problems(execute.read(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(list(NOTEBOOKS)))
def test_it_says_what_one_learns_and_where_to_go_on(path: Path):
    first, *_, last = execute.read(path).cells
    assert re.match(r"# .+\n\nAfter this notebook you ", first.source)
    assert last.source.startswith("## Where to go on\n") and "(../docs/" in last.source
    assert broken_links(path) == []


# ---- the executor ----------------------------------------------------------------------------------


def notebook(*sources: str, tags: tuple[str, ...] = ()) -> NotebookNode:
    return execute.cleaned(new_notebook(cells=[new_code_cell(s, metadata={"tags": list(tags)}) for s in sources]))


@pytest.mark.slow
def test_the_kernel_is_this_python_in_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--planted")
    monkeypatch.setenv("RESHARD_MPI_NODES", "7")
    done = execute.executed(
        notebook(
            "import os, shutil, sys, reshard; print(sys.executable, reshard.__file__, os.getcwd())",
            "print([n for n in os.environ if n.startswith(('XLA_', 'RESHARD_', 'PYTEST_'))], shutil.which('python'))",
        )
    )
    first, second = (cell.outputs[0].text.split() for cell in done.cells)
    assert first == [sys.executable, reshard.__file__, str(execute.HERE)]
    assert second == ["[]", str(Path(sys.executable).with_name("python"))]


@pytest.mark.slow
def test_two_runs_are_stored_alike_and_a_cell_that_fails_raises():
    given = notebook("print('a')\nprint('b')", "!echo c", "1 + 1", "1 + 1")
    first, second = execute.executed(given), execute.executed(given)
    assert first == second
    assert problems(first) == []
    assert [list(execute.shown(cell)) for cell in first.cells] == [
        ["stdout:", "a", "b"],
        ["stdout:", "c"],
        ["text/plain:", "2"],
        ["text/plain:", "2"],
    ]
    with pytest.raises(CellExecutionError, match="planted"):
        execute.executed(notebook("raise ValueError('planted')"))


def test_only_what_changed_is_said_and_what_varies_may():
    stored, fresh = notebook("x", "y", "z"), notebook("x", "y", "z")
    for one, text in ((stored, "1"), (fresh, "2")):
        one.cells[0].outputs = [new_output("stream", name="stdout", text="same")]
        one.cells[1].outputs = [
            new_output("execute_result", {"text/plain": text, "text/html": f"<b class='{text}'>same &lt; </b>"})
        ]
        one.cells[2].outputs = [new_output("display_data", {"text/plain": text, "image/png": text})]
    (changed,) = execute.differences(stored, fresh)
    assert changed.splitlines() == [
        "cell [2] y",
        "--- stored",
        "+++ fresh",
        "@@ -1,4 +1,4 @@",
        " text/html:",
        " same <",
        " text/plain:",
        "-1",
        "+2",
    ]
    for cell in stored.cells:
        cell.metadata["tags"] = ["varies"]
    assert execute.differences(stored, fresh) == []
    fresh.cells[1].outputs = []
    assert len(execute.differences(stored, fresh)) == 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (new_output("stream", name="stdout", text="in /tmp/x.py"), "cell [1] shows a path or host: /tmp"),
        (new_output("stream", name="stdout", text="at /home/me"), "cell [1] shows a path or host: /home"),
        (new_output("execute_result", {"text/plain": "from pypi"}), "cell [1] shows a path or host: pypi"),
        (new_output("stream", name="stderr", text="warning"), "cell [1] has stderr output"),
        (new_output("stream", name="stdout", text="\x1b[1mbold"), "cell [1] has colour codes"),
        (new_output("stream", name="stdout", text="Traceback (most recent call last):"), "cell [1] has a traceback"),
        (new_output("error", ename="E", evalue="wrong"), "cell [1] has error output"),
    ],
)
def test_what_must_not_be_stored_is_found(output: NotebookNode, message: str):
    given = notebook("x")
    given.cells[0].execution_count = 1
    assert problems(given) == []
    given.cells[0].outputs = [output]
    assert problems(given) == [message]


def test_a_notebook_from_an_editor_is_found():
    given = notebook("x")
    given.cells[0].execution_count = 3
    given.cells[0].metadata["execution"] = {"iopub.execute_input": "2024"}
    assert len(problems(given)) == 2
    given = notebook("x")
    given.cells[0].execution_count = 1
    given.cells.append(new_markdown_cell("added"))
    assert len(problems(given)) == 1


@pytest.mark.slow
def test_the_command_writes_or_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "09_tiny.ipynb"
    execute.write(notebook("2 * 3"), path)
    monkeypatch.setattr(execute, "NOTEBOOKS", (path,))
    assert execute.main(["--check"]) == 1
    assert "+6" in capsys.readouterr().out
    assert execute.main([]) == 0
    assert execute.main(["09_tiny", "--check"]) == 0
    assert "no cells changed" in capsys.readouterr().out
    execute.write(notebook("2 *"), path)
    assert execute.main([]) == 1
    assert "SyntaxError" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        execute.main(["10_none"])
