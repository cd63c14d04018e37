"""`import reshard`: its names are there when they are used, and what is missing says how to install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import reshard as rs

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, *flags: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Layout", "reshard.types.layout"),
        ("Mesh", "reshard.types.mesh"),
        ("Plan", "reshard.plans.plan"),
        ("Step", "reshard.plans.step"),
        ("plan", "reshard.synth.planner"),
        ("plan_tree", "reshard.synth.planner"),
        ("TreePlan", "reshard.plans.plan"),
        ("Manifest", "reshard.plans.manifest"),
        ("Network", "reshard.synth.network"),
        ("Link", "reshard.synth.wires"),
        ("prove", "reshard.proofs"),
        ("Proof", "reshard.proofs.proof"),
        ("ProofError", "reshard.errors"),
        ("simulate", "reshard.runtime.on_numpy"),
    ],
)
def test_a_public_name(name: str, home: str):
    assert name in dir(rs)
    assert getattr(rs, name).__module__.startswith(home)


def test_a_name_loads_what_it_needs_and_nothing_else():
    code = "import sys, reshard as rs; rs.plan; print(*(n in sys.modules for n in {}))"
    names = ["reshard.synth.planner", "reshard.proofs", "reshard.runtime", "reshard.lower", "numpy", "jax"]
    assert python(code.format(names)) == "True False False False False False"


@pytest.mark.parametrize("package", ["jax", "mpi", "draw"])
def test_packages_of_other_libraries_load_when_they_are_used(package: str):
    assert python(f"import reshard as rs; print(rs.{package}.__name__)") == f"reshard.{package}"


@pytest.mark.parametrize(("package", "library"), [("jax", "jax"), ("mpi", "mpi4py")])
def test_a_missing_library_says_how_to_install_it(package: str, library: str):
    use = {"jax": "rs.jax", "mpi": "rs.mpi.DistArray"}[package]
    blocked = f"import sys; sys.modules[{library!r}] = None"
    message = python(f"{blocked}\nimport reshard as rs\ntry: {use}\nexcept ImportError as e: print(e)")
    assert f"needs {library}" in message
    assert f"pip install {library}" in message


@pytest.mark.slow
def test_another_missing_module_is_not_blamed_on_the_library():
    code = (
        "import sys; sys.modules['reshard.jax.redistribute'] = None\nimport reshard as rs\n"
        "try: rs.jax\nexcept ImportError as e: print('reshard.jax.redistribute' in str(e), 'pip' in str(e))"
    )
    assert python(code) == "True False"


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'reshard' has no attribute 'plann'"):
        rs.plann  # noqa: B018
    assert not hasattr(rs, "numpy")


def test_all_names_are_there():
    assert rs.__all__ == sorted(rs.__all__, key=lambda name: (name.islower(), name))
    assert set(rs.__all__) == {"Layout", "Mesh", "ProofError", "errors", *rs._HOMES}


STANDARD_LIBRARY_ALONE = """
import reshard as rs
from reshard.cli import main
mesh = rs.Mesh(x=4, y=2)
source, target = (rs.Layout.parse(text, mesh) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"))
for more in ({}, {"network": "tpu-v5p"}, {"budget": 4500}):
    rs.plan(source, target, **more)
rs.plan_tree({"a": (source, target)})
rs.plan(*(rs.Layout.from_owners([at * k % 8 for at in range(600)], mesh, (600,), "f32") for k in (3, 5)))
assert main(["plan", "--mesh", "x=4,y=2", str(source), str(target), "--json"]) == 0
assert main(["plan", "--mesh", "x=4,y=2", str(source), str(target)]) == 0
"""


def test_planning_needs_the_standard_library_alone():
    """numpy loads when something runs; rich, when a terminal is drawn on: without it, plans are plain text."""
    assert python(STANDARD_LIBRARY_ALONE, "-S").splitlines()[-1].startswith("received 1792 B (bound 1792 B), 1 launch")
