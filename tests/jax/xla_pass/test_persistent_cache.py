"""jax's persistent cache beside the pass: programs never mix, and what the pass must see is compiled."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

import reshard as rs
from reshard.hlo import Array
from reshard.jax.jit import jit
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.fragments import FragmentKey, Fragments, MoveKey
from tests.jax.moving import numbered, program

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
OTHER_PROCESS = f"""
import sys, jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import reshard.jax
directory, switch, function = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", directory)
for name, value in {SETTINGS}.items():
    jax.config.update(name, value)
if switch == "on":
    reshard.jax.enable()
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("y", "x"))
before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))
def step(a):
    return getattr(jnp, function)(jax.lax.with_sharding_constraint(a + a, after))
compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((64,) * 3, "float32", sharding=before)).compile()
print(compiled.as_text().count("all-gather("))
"""


@pytest.fixture
def cache(tmp_path):
    """The cache in a directory that is empty before, for programs of any size."""
    from jax._src import compilation_cache

    settings = {"jax_compilation_cache_dir": str(tmp_path), **SETTINGS}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_fragment_neither_comes_from_it_nor_goes_there(cache):
    """One from the cache is not compiled, so that the pass would never see its module."""
    mesh = rs.Mesh(x=8)
    plan = rs.plan(*(rs.Layout.parse(text, mesh) for text in ("f32[{x}2, 16]", "f32[16, {x}2]")))
    move = MoveKey(plan, Array("f32", (16, 2), "1,0"), ((2, 16), (16, 1)))
    key = FragmentKey((Array("f32", (2, 16), "1,0"),), (move,))
    with xla_hook.enabled():
        first, second = (Fragments(jax.devices()).get(key) for _ in range(2))
    assert first[1:] == second[1:] and not list(cache.iterdir())


def test_what_was_replaced_in_a_program_from_it_is_not_known(cache):
    """... and the decision says so."""
    whys = [jit(lambda v: program(v)).lower(numbered()).compile().decision.why for _ in range(2)]
    assert whys[0].startswith("1792 B received instead of") and whys[1].startswith("jax's persistent cache had it")


def test_another_source_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache that outlives the code must not serve what older code made; equal code is one version wherever it is."""
    assert "plans/plan.py" in xla_hook._list_source_files()
    versions = []
    for folder, name, code in (("a", "x.py", "1"), ("b", "x.py", "1"), ("c", "x.py", "2"), ("d", "y.py", "1")):
        (tmp_path / folder / "types").mkdir(parents=True)
        (tmp_path / folder / "types" / name).write_text(code)
        monkeypatch.setattr(xla_hook, "_PACKAGE", tmp_path / folder)
        versions.append(xla_hook.digest_source.__wrapped__())
    assert versions[0] == versions[1] and len(set(versions)) == 3
    assert xla_hook.digest_source() in _key_with_the_pass_on()


def _key_with_the_pass_on() -> str:
    from jax._src import cache_key

    with xla_hook.enabled():
        return cache_key.custom_hook()


@pytest.mark.slow
def test_other_processes(tmp_path: Path):
    """Programs with and without the pass do not mix; a move that another process has compiled is taken over, too."""

    def gathers(*arguments: str) -> int:
        command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)

    assert gathers("off", "tanh") > 0
    assert gathers("on", "tanh") == 0
    assert gathers("off", "tanh") > 0
    assert gathers("on", "sin") == 0
