"""Plants each fault of `tests/faults/*.toml` in a copy of the package, and says whether its tests notice.

    python tests/plant_faults.py                    every fault; the last line counts those that were found
    python tests/plant_faults.py geometry mpi       those of two files
    python tests/plant_faults.py --only NAME        one

A fault is one small mistake of the kind that a change of the code may bring: `find` stands once in `file`, and
`replace` takes its place. `tests` are the paths that ought to fail then, in their fast tier unless a name says slow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "faults"
LIMIT = 600  # seconds; a fault that makes its tests hang is found, too
TESTS_FAILED = 1


class Fault(NamedTuple):
    """A mistake to plant: text that stands once in a file, and what takes its place."""

    name: str
    file: str
    find: str
    replace: str
    tests: str


def read_faults(names: list[str] | None = None) -> Iterator[Fault]:
    """The faults of these files, or of all."""
    for path in sorted(FOLDER.glob("*.toml")):
        if not names or path.stem in names:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            yield from (Fault(**fault) for fault in data["fault"])


def replace_text(fault: Fault, text: str) -> str:
    """The text of its file with the fault; `ValueError` if what it replaces does not stand there exactly once."""
    if text.count(fault.find) != 1 or fault.find == fault.replace:
        raise ValueError(f"{fault.name}: its text stands {text.count(fault.find)} times in {fault.file}")
    return text.replace(fault.find, fault.replace)


def is_found(fault: Fault, root: Path) -> bool:
    """Whether a test fails in the tree at `root`, in which the fault is planted."""
    # Tests that a fault calls slow by their name are the only ones that see it.
    tier = "not sweep" if "slow" in fault.tests else "not slow and not sweep"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", tier]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, *fault.tests.split()], cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return True
    if run.returncode > TESTS_FAILED:
        raise ValueError(f"{fault.name}: pytest could not run: {run.stdout[-500:]}{run.stderr[-500:]}")
    # A process that a signal ends, as a fault in compiled code does, has a negative one.
    return run.returncode != 0


def copy_tree(root: Path) -> None:
    """Copies what git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names in tests/faults, without .toml")
    parser.add_argument("--only", metavar="NAME", help="one fault")
    options = parser.parse_args()
    faults = [fault for fault in read_faults(options.files) if options.only in (None, fault.name)]
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_tree(root)
        for fault in faults:
            planted = replace_text(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
            (root / fault.file).write_text(planted, encoding="utf-8")
            start = time.monotonic()
            found = is_found(fault, root)
            shutil.copy2(ROOT / fault.file, root / fault.file)
            missed += [] if found else [fault.name]
            print(f"{'found' if found else 'MISSED':8} {time.monotonic() - start:6.1f} s  {fault.name}", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} found" + (f"; missed: {', '.join(missed)}" if missed else ""))
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
