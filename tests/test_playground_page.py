"""The playground in headless Chromium with the real Pyodide, where both are on this machine; see playground.mjs."""

from __future__ import annotations

import functools
import http.server
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NODE_MODULES = Path(os.environ.get("RESHARD_NODE_MODULES", Path(sys.prefix) / "node" / "node_modules"))
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
MISSING = [
    what
    for what, there in (
        ("node", shutil.which("node")),
        ("Chromium", CHROMIUM),
        ("pyodide", (NODE_MODULES / "pyodide").exists()),
        ("playwright-core", (NODE_MODULES / "playwright-core").exists()),
    )
    if not there
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


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The playground of this checkout, served on this machine."""
    runpy.run_path(str(ROOT / "docs" / "playground.py"))["build"](tmp_path, NODE_MODULES / "pyodide")
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}; make playground brings packages")
def test_it_plans_as_a_person_types(address: str):
    playwright = NODE_MODULES / "playwright-core" / "index.mjs"
    line = ["node", str(ROOT / "tests" / "playground.mjs"), address, CHROMIUM, str(playwright)]
    line += [folder] if (folder := os.environ.get("RESHARD_SCREENSHOTS")) else []
    run = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    checks = [(said["check"], said["value"]) for said in map(json.loads, run.stdout.splitlines())]
    one = dict(checks)
    assert one["errors"] == []
    assert one["first"] is True and one["mended"] is True
    assert [name for name in one["tabs"] if name != "A"][: len(CONTROLS)] == CONTROLS
    assert "14launches" in one["budget"] and "budget=4500" in one["link"]
    assert "f32[{y}8, 16, {x}4]}" in one["problem"]
    assert one["shared"] is True
    assert max(value for check, value in checks if check == "overflow") <= 0
