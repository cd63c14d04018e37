"""The playground in headless Chromium with the real Pyodide, where both are on this machine; see playground.mjs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = Path(os.environ.get("RESHARD_NODE_MODULES", Path(sys.prefix) / "node" / "node_modules"))
MISSING = [
    what for what, there in (("node", shutil.which("node")), ("pyodide", (MODULES / "pyodide").exists())) if not there
]
CONTROLS = [
    "example",
    "mesh",
    "source",
    "target",
    "budget",
    "network",
    "target_mesh",
    "shape",
    "dtype",
    "donate",
    "copy",
]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}; make docs brings packages")
def test_it_plans_as_a_person_types(tmp_path: Path):
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "RESHARD_NODE_MODULES": str(MODULES)}
    subprocess.run(build, cwd=ROOT, env=env, check=True)
    line = ["node", str(ROOT / "tests" / "playground.mjs"), str(tmp_path)]
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
