"""Records of benchmarks: complete, measured at commits of this history, and rewritten by running their command."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import for_each

ROOT = Path(__file__).resolve().parent.parent
RECORD = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))
RECORDS: dict[str, dict[str, str]] = RECORD["read_records"]()


@for_each(RECORDS)
def test_a_record_says_what_when_and_where(name: str):
    record = RECORDS[name]
    assert all(record[field].strip() for field in RECORD["FIELDS"] if field != "notes")
    assert record["question"].endswith("?")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert not re.search(r"/(work|home|tmp|root)/", "".join(record.values())), "a path of one machine"
    assert re.search(r"benchmarks/\w+(?:\.py|/)|reshard |make bench|python -m tests\.", record["command"])
    scripts = re.findall(r"benchmarks/\w+\.py", record["command"])
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_records_are_of_commits_of_this_history():
    def git(*words: str) -> Any:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    commits = {name: record["commit"] for name, record in RECORDS.items()}
    lost = {name: at for name, at in commits.items() if git("merge-base", "--is-ancestor", at, "HEAD").returncode}
    assert lost == {}, "measure at a commit that has landed"


def test_running_a_record_keeps_what_is_printed_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = {"title": 'A "title"', "group": "plans", "question": "How many?", "notes": "a \\ b"}
    printed = '| a | b |\n|---|---|\n| "x" | \\n 7 |'
    script = tmp_path / "prints.py"
    script.write_text(f"import sys\nprint({printed!r} if sys.argv[1:] == ['--seed', '7'] else '')\n", encoding="utf-8")
    record = {**begun, "command": f"{sys.executable} {script} --seed 3"}
    RECORD["write_record"](tmp_path / "sample.toml", record)
    monkeypatch.setitem(RECORD["run_record"].__globals__, "RESULTS", tmp_path)
    RECORD["run_record"]("sample", "7")
    stored = RECORD["read_records"](tmp_path)["sample"]
    assert stored["output"].strip("\n") == printed and stored["notes"].strip() == "a \\ b"
    assert stored["command"].endswith("prints.py --seed 7") and stored["title"].strip() == begun["title"]

    (tmp_path / "sample.toml").write_text((tmp_path / "sample.toml").read_text().replace("prints.py", "none.py"))
    before = (tmp_path / "sample.toml").read_text()
    with pytest.raises(SystemExit, match="stays as it was"):
        RECORD["run_record"]("sample", None)
    assert (tmp_path / "sample.toml").read_text() == before
    (tmp_path / "sample.toml").write_text(before.replace("question", "answer"))
    with pytest.raises(ValueError, match="answer"):
        RECORD["read_records"](tmp_path)
    assert tomllib.loads(before)["group"] == "plans"


def test_the_page_has_every_record_with_its_anchor():
    page = RECORD["list_records"]()
    assert re.findall(r'^<a id="(\w+)"></a>$', page, re.MULTILINE) == [*RECORDS]
