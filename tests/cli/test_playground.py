"""The playground's answers: the plan that the command would print, or its message; and the examples have plans."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.cli.playground import FIELDS, answer_fields
from tests.cli.cases import ROOT

PAGE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "playground.py"))


@pytest.mark.parametrize("name", PAGE["EXAMPLES"])
def test_an_example_has_a_plan_and_a_picture(name: str):
    shown = answer_fields(PAGE["EXAMPLES"][name])
    assert "error" not in shown
    assert "received" in shown["sums"] and "<title>device" in shown["tiles"] and "floor" in shown["memory"]


def test_the_command_says_the_same():
    shown = answer_fields({"mesh": "x=2", "source": "f32[{x}2]", "target": "f32[4]", "budget": "1KiB", "donate": "yes"})
    assert shown["command"] == "reshard plan --mesh x=2 --budget 1KiB --donate 'f32[{x}2]' 'f32[4]'"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "fill in mesh and source and target"),
        ({"mesh": "x=2", "source": "f32[{x}2"}, "fill in target"),
        ({"mesh": "x=2", "source": "f32[{x}2", "target": "f32[4]"}, "f32[{x}2"),
        ({"mesh": "x=<b>", "source": "f32[4]", "target": "f32[4]"}, "x=<b>"),
        ({"mesh": "x=2", "source": "f32[4]", "target": "f32[4]", "budget": "much"}, "much"),
        ({"mesh": "x=2", "source": "f32[4]", "target": "f32[4]", "network": "tpu"}, "tpu"),
    ],
)
def test_a_mistake_is_a_message(fields: dict[str, str], words: str):
    assert words in answer_fields(fields)["error"]


def test_the_page_has_a_control_for_every_field():
    page = PAGE["write_files"]()["playground.md"]
    assert all(page.count(f'name="{name}"') == 1 for name in FIELDS)
    assert "https://" not in page


def test_a_browser_needs_the_standard_library_alone():
    """Pyodide has the package and nothing else: no rich, no numpy."""
    given = PAGE["EXAMPLES"]["one all-to-all"]
    code = f"from reshard.cli.playground import answer_fields; print(sorted(answer_fields({given!r})))"
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("['command', 'memory'"), ran.stderr
