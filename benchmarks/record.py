"""Runs the command of a record in benchmarks/results and stores what it prints, with the date, commit and machine.

    python benchmarks/record.py mpi_calls               # runs the record's command
    python benchmarks/record.py mpi_calls --seed 7      # with another seed
    python benchmarks/record.py --page                  # prints the page that shows all of them

A record is a file `benchmarks/results/NAME.toml`. To begin one, write its title, group, question and command; this
program adds the rest:

    title     what was measured
    group     where the page shows it: one of "plans", "JAX", "MPI", "files", "weights", "networks"
    question  the question of a user that it answers, one sentence
    command   what is typed in a clone; other programs are named by environment variables, never by paths of one machine
    date, commit, machine
    output    what the command printed; a table that begins with "|" is shown as one
    notes     how to read it, if that needs words

The commit must be on main when the record goes in: measure what has landed. docs/site_pages.py puts the page together.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import textwrap
import tomllib
from datetime import date
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GROUPS = ("plans", "JAX", "MPI", "files", "weights", "networks")
FIELDS = ("title", "group", "question", "command", "date", "commit", "machine", "output", "notes")


def read_records(folder: Path = RESULTS) -> dict[str, dict[str, str]]:
    """The records by name, in the order of the page; ValueError for one that lacks something or has too much."""
    records: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.toml")):
        record = tomllib.loads(path.read_text(encoding="utf-8"))
        wrong = {*FIELDS[:-1]} ^ ({*record} - {"notes"})
        if wrong or record["group"] not in GROUPS or not all(isinstance(value, str) for value in record.values()):
            raise ValueError(f"{path}: {sorted(wrong) or record['group']}; its fields are {FIELDS}, all text")
        records[path.stem] = record
    return dict(sorted(records.items(), key=lambda item: (GROUPS.index(item[1]["group"]), item[0])))


def write_record(path: Path, record: dict[str, str]) -> None:
    """Stores a record in the order of its fields; what has several lines is kept to the letter."""
    lines: list[str] = []
    for name in FIELDS:
        if (value := record.get(name)) is None:
            continue
        if "'''" in value:
            raise ValueError(f"{path}: {name} has three quotes in a row, which the file cannot hold")
        plain = not re.search(r"[\n\"\\]", value)
        lines.append(f'{name} = "{value}"' if plain else f"{name} = '''\n{value.strip(chr(10))}\n'''")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def describe_machine() -> str:
    """The processor, its cores and the memory, as far as the system says."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def run_record(name: str, seed: str | None) -> None:
    """Runs a record's command and stores its output, unless it fails; its errors and progress stay in the terminal."""
    path = RESULTS / f"{name}.toml"
    record = tomllib.loads(path.read_text(encoding="utf-8"))
    command = record["command"].strip()
    if seed is not None:
        command = re.sub(r" --seed \S+", "", command) + f" --seed {seed}"
    # `python` and `reshard` of the environment that runs this, as in a shell where it is activated.
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": binaries, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{command}\nended with {ran.returncode}, so {path.name} stays as it was; it printed\n{ran.stdout}")
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = {"date": date.today().isoformat(), "commit": commit.stdout.strip(), "machine": describe_machine()}
    printed = "\n".join(line.rstrip() for line in ran.stdout.splitlines()).strip("\n")
    write_record(path, {**record, "command": command, **found, "output": printed})


def list_records() -> str:
    """The tables of all records in Markdown, by group: each has its name as its anchor."""
    parts: list[str] = []
    group = ""
    for name, record in read_records().items():
        if record["group"] != group:
            group = record["group"]
            parts.append(f"## {group[0].upper()}{group[1:]}")
        parts += [f'<a id="{name}"></a>\n\n### {record["title"]}', record["question"]]
        for is_table, lines in groupby(record["output"].strip("\n").splitlines(), lambda line: line.startswith("|")):
            if is_table:
                parts.append("\n".join(lines).replace("<", "&lt;"))  # Meshes such as <x=4> are no tags.
                continue
            # Lines that are wider than a page go on in the next one.
            text = "\n".join(textwrap.fill(line, 96, subsequent_indent=" " * 6) for line in lines).strip("\n")
            parts.append(text and f"```text\n{text}\n```")
        command = " \\\n    ".join(textwrap.wrap(record["command"], 90, break_on_hyphens=False))
        parts += [
            record.get("notes", "").strip(),
            f"```console\n$ {command}\n```",
            f"*{record['date']}, commit {record['commit']}. {record['machine']}.*",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("name", nargs="?", help="a file in benchmarks/results, without .toml")
    options.add_argument("--seed", help="passed on in the place of the record's own")
    options.add_argument("--page", action="store_true", help="print what the page shows, and run nothing")
    given = options.parse_args()
    if given.page:
        print(list_records())
    elif given.name and (RESULTS / f"{given.name}.toml").exists():
        run_record(given.name, given.seed)
    else:
        options.error(f"say which: {', '.join(path.stem for path in sorted(RESULTS.glob('*.toml')))}")


if __name__ == "__main__":
    main()
