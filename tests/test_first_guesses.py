"""What people type first, who know JAX, numpy and MPI: it works, or an error names the thing and the cure.

A guess in Python is an expression, one on the command line the words that a shell hands over. Beside each that does not
work stand the thing and the cure that its error has. No exception is one of another library, or Python's own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard as rs
from reshard.cli import main
from reshard.errors import ReshardError, name_arguments

WORKS = ("", "")
PYTHON: dict[str, tuple[str, str]] = {
    # meshes and layouts
    "rs.Mesh(x=4, y=2)": WORKS,
    "rs.Mesh(jax_mesh)": WORKS,
    "rs.Mesh('x=4,y=2')": WORKS,
    "rs.Mesh((4, 2), ('x', 'y'))": WORKS,
    "rs.Mesh(4)": ("mesh axes 4", "give a dict of name to size"),
    "rs.Layout.parse('f32[{x}4, 8]', jax_mesh)": WORKS,
    "rs.Layout.parse(\"P('x', None)\", mesh)": ("P('x', None)", "write dtype[dims]"),
    "rs.Layout.from_jax(x.sharding, x.shape, x.dtype)": WORKS,
    "rs.Layout.from_jax(P('x'), (16, 8), 'f32')": ("is a P", "NamedSharding(mesh"),
    "rs.Layout.from_spec(mesh, (16, 8), jnp.bfloat16, P('x', None))": WORKS,
    "rs.Layout.from_spec(P('x'), mesh, (16, 8), 'f32')": WORKS,
    "rs.Layout.from_sizes([3, 5, 0, 5], rs.Mesh(x=4), (13,), 'f32')": WORKS,
    # plans
    "rs.plan(rows, columns)": WORKS,
    "rs.plan(source=rows, target=columns, budget='1GB', network='h100')": WORKS,
    "rs.plan(rows, columns, mesh=mesh)": WORKS,
    "rs.plan(rows, columns, budget=1e9)": WORKS,
    "rs.plan(rows, columns, network='TPU_v5p')": WORKS,
    "rs.plan((rows, columns))": ("is a tuple", "write plan(source, target)"),
    "rs.plan({'w': (rows, columns)})": ("is a dict", "plan_tree({name: (source, target)})"),
    "rs.plan_tree([(rows, columns)])": WORKS,
    "rs.plan_tree({'w': rows}, {'w': columns})": ("plan_tree takes", "{name: (source, target)}"),
    "rs.Plan.from_json(plan.to_dict())": ("it is a dict", "to_json()"),
    "plan.to_json('plan.json')": ("'plan.json'", "give a whole number"),
    "rs.simulate(plan, np.ones((16, 8), 'f4'))": ("a ndarray", "a dict of one tile per device"),
    "rs.prove(rows, columns)": ("is a Layout, not a Plan", "reshard.plan()"),
    "rs.verify(plan)": WORKS,
    # jax
    "rs.jax.redistribute(x, P(None, 'x'))": WORKS,
    "rs.jax.redistribute(x, columns)": WORKS,
    "rs.jax.redistribute(x, jax.devices()[0])": WORKS,
    "rs.jax.redistribute(np.ones((16, 8), 'f4'), x.sharding)": WORKS,
    "rs.jax.redistribute(x, P('x'), budget='1MiB', donate=False)": WORKS,
    "rs.jax.redistribute(x, ('x', None))": ("('x', None)", "PartitionSpec('x', None)"),
    "rs.jax.redistribute({'w': x}, {'w': ('x', None)})": ("('x', None)", "PartitionSpec('x', None)"),
    "rs.jax.redistribute(x, 'x')": ("'x'", "PartitionSpec('x', None)"),
    "rs.jax.redistribute(x, jax_mesh)": ("is a Mesh", "give a NamedSharding"),
    "rs.jax.redistribute(x, jax_mesh, P('x'))": ("3 were given", "redistribute(x, sharding"),
    "rs.jax.redistribute(x, jax.devices())": ("not a prefix", "give one sharding for all"),
    "rs.jax.redistribute(x, x)": ("an array of float32[16, 8]", "write redistribute(x, sharding)"),
    "rs.jax.redistribute([[1, 2], [3, 4]], x.sharding)": ("a number has none", "np.array(numbers)"),
    "rs.jax.enable(True)": ("1 was given", "enable(*, network"),
    "rs.jax.report(lambda v: v + 1, x)": ("2 were given", "report(f, *"),
    # MPI, on one rank
    "rs.mpi.redistribute(tile, here, there, comm, budget='1MiB')": WORKS,
    "rs.mpi.DistArray(here, tile, comm).redistribute(there).sum()": WORKS,
    "rs.mpi.redistribute(tile, 'f32[{x}4, 8]', there, comm)": WORKS,
    "rs.mpi.launch(4, 'script.py')": ("'script.py'", "give a list"),
    # files
    "rs.files.save('none.pt', {'w': np.ones(4)})": ("'pt'", "give safetensors or one of zarr"),
    # meshes, by other words
    "rs.Mesh([('x', 4), ('y', 2)])": WORKS,
    "rs.Mesh([4, 2], ['x', 'y'])": WORKS,
    "rs.Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))": WORKS,
    "rs.Mesh(jax_mesh.abstract_mesh)": WORKS,
    "rs.Mesh(x=np.int64(4))": WORKS,
    "rs.Mesh(x=2, device_ids=jax.devices()[:2])": WORKS,
    "mesh.shape['x']": WORKS,
    "rs.Mesh(jax.devices())": ("mesh axes [CpuDevice(id=0)", "give a dict of name to size"),
    "rs.Mesh(shape=(4, 2), axis_names=('x', 'y'))": ("axis 'shape'", "Mesh((4, 2), ('x', 'y'))"),
    # layouts, by other words
    "rs.Layout.parse('f32[{x}4, 8]', 'x=4')": WORKS,
    "rs.Layout('f32[{x}4, 8]', mesh)": ("'f32[{x}4, 8]'", "with Layout.parse(text, mesh)"),
    "rs.as_layout(x)": WORKS,
    "rs.as_layout('f32[{x}4, 8]', 'x=4')": WORKS,
    "rs.as_layout(P('x'), jax_mesh, x.shape, x.dtype)": WORKS,
    "rs.as_layout([['x', 'y'], []], mesh, (16, 8), 'f32')": WORKS,
    "rs.as_layout(jax.ShapeDtypeStruct((16, 8), 'f4', sharding=x.sharding))": WORKS,
    "rs.as_layout(\"P('x', None)\", mesh, x.shape, x.dtype)": WORKS,
    "rs.as_layout(\"('x', None)\", mesh, x.shape, x.dtype)": WORKS,
    "rs.as_layout('[Shard(0), Replicate()]', mesh, (16, 8), 'f32')": WORKS,
    "rs.as_layout(['S(0)', 'R'], mesh, (16, 8), 'f32')": WORKS,
    "rs.Layout.from_spec(('x',), 'x=4', (16, 8), np.float32)": WORKS,
    "rs.Layout.from_dtensor('[Shard(0), Replicate()]', mesh, (16, 8), 'float32')": WORKS,
    "rs.Layout.from_shardy('[{\"x\"}, {}]', mesh, (16, 8), 'f32')": WORKS,
    "rows.to_jax(jax_mesh)": WORKS,
    "rows.tile_shape, rows.shape, rows.ndim, rows.size, rows.dtype, rows.mesh": WORKS,
    "rows.tiles(x)": WORKS,
    "rows.assemble(rows.tiles(x))": WORKS,
    "rows.with_local(dim=0, to=1)": WORKS,
    # plans of whatever says a layout, by other words
    "rs.plan('f32[{x}4, 8]', 'f32[16, {x}2]', mesh='x=4')": WORKS,
    "rs.plan('f32[{x}4, 8]', \"P(None, 'x')\", mesh=jax_mesh)": WORKS,
    "rs.plan(rows, P(None, 'x'))": WORKS,
    "rs.plan(rows, [None, 'x'])": WORKS,
    "rs.plan(rows, ['R', 'S(0)'])": WORKS,
    "rs.plan(x, P(None, 'x'))": WORKS,
    "rs.plan(x, 'f32[16, {x}2]', network='tpu-v5p')": WORKS,
    "rs.plan(rows, columns, budget='1 GB', donate=True)": WORKS,
    "rs.plan(rows, columns, network='none')": WORKS,
    "rs.plan(rows, columns, network={'x': 1e9})": ("axis 'x'", "give a Link or (latency"),
    "rs.plan(rs.Move(rows, rs.Layout.parse('bf16[16, 8]', mesh), cast=True))": WORKS,
    "rs.Move(rows, P())": ("the target P()", "read it with reshard.as_layout"),
    "rs.plan_tree({'w': ('f32[{x}4, 8]', 'f32[16, 8]')}, mesh=mesh)": WORKS,
    "rs.plan_tree({'w': (x, P())}, budget='1MiB')": WORKS,
    "rs.plan_tree({'layers': [(rows, columns), (rows, columns)]})": WORKS,
    "rs.plan_tree((rows, columns))": ("is not a tree of moves", "give a dict of names and (source, target) pairs"),
    "rs.sweep([('f32[{x}4, 8]', \"P(None, 'x')\")], ['x=4', 'x=8'], ['h100', 'tpu-v5p'], ['1MiB'])": WORKS,
    "rs.sweep([(\"P('x')\", \"P(None, 'x')\")], mesh, shape=(16, 8), dtype='f32')": WORKS,
    "rs.sweep({'w': (rows, columns)}, networks='h100').to_csv()": WORKS,
    "rs.path(['f32[{x}4, 8]', 'f32[16, {x}2]'], network='h100', mesh=mesh).seconds": WORKS,
    "rs.verify(plan.to_descriptors(), 'f32[{x}4, 8]', 'f32[16, {x}2]', mesh=mesh)": WORKS,
    "rs.Network.preset('h100')": WORKS,
    "rs.redistribute(x, P(None, 'x'))": WORKS,
    "rs.redistribute(x, \"P(None, 'x')\")": WORKS,
    "rs.redistribute(tile, there, source=here, comm=comm)": WORKS,
    "rs.redistribute(rows.tiles(x), columns, source=rows)": WORKS,
    "rs.redistribute(rs.mpi.DistArray(here, tile, comm), there)": WORKS,
    "rs.redistribute(np.ones((16, 8), 'f4'), P('x'))": ("an array of float32[16, 8]", "with source= and comm="),
    "rs.redistribute(tile, here, there, comm)": ("4 were given", "redistribute(x, target, *, source, comm"),
    # jax, by other words
    "rs.jax.redistribute(x, \"P(None, 'x')\")": WORKS,
    "rs.jax.redistribute(x, 'f32[16, {x}2]')": WORKS,
    "rs.jax.redistribute(x, sharding=P())": WORKS,
    "rs.jax.redistribute({'w': x, 'v': x}, P(), budget='1MiB')": WORKS,
    "rs.jax.redistribute(x, None)": WORKS,
    "rs.jax.redistribute(x, P(('x', 'y')), prefer='measured')": WORKS,
    "jax.jit(lambda v: rs.jax.redistribute(v, P(None, 'x')))(x)": WORKS,
    "rs.jax.reshard_pytree({'w': x}, P())": WORKS,
    "rs.jax.report(lambda v: v + 1)(x)": WORKS,
    "rs.jax.jit(lambda v: v + 1)(x)": WORKS,
    # MPI, by other words
    "rs.mpi.redistribute(tile, here, \"P(None, 'x')\", comm)": WORKS,
    "rs.mpi.redistribute(tile, here, P(None, 'x'), comm)": WORKS,
    "rs.mpi.prepare('f32[{x}4, 8]', there, comm)(tile)": WORKS,
    "rs.mpi.move(tile, rs.Move(here, there), comm)": WORKS,
    "rs.mpi.move(tile, here, there, comm)": ("4 were given", "move(tile, move, comm"),
    "rs.mpi.DistArray(here, tile, comm).redistribute(1)": WORKS,
    "rs.mpi.DistArray(here, tile, comm).redistribute('f32[4, {x}8]')": WORKS,
    "np.sum(rs.mpi.DistArray(here, tile, comm))": WORKS,
    "rs.files.save(folder + '/a', {'w': np.ones((4, 8), 'f4')})": WORKS,
    "rs.files.save(folder + '/a.safetensors', {'w': np.ones((4, 8), 'f4')})": WORKS,
    "rs.files.save(folder + '/z', {'w': x}, format='zarr')": WORKS,
    "rs.files.open(saved)['w'].shape": WORKS,
    "list(rs.files.open(saved))": WORKS,
    "rs.files.load(saved, {'w': rs.Layout.parse('f32[{x}2, 8]', 'x=2')})": WORKS,
    "rs.mpi.DistArray(here, tile, comm).to_global(root=None)": WORKS,
    "rs.mpi.DistArray(here, tile, comm).mean(0)": WORKS,
    "np.sqrt(rs.mpi.DistArray(here, tile, comm))": WORKS,
    "plan.draw()": WORKS,
    "rs.Network.presets()": WORKS,
    "rs.Layout.from_chunks(((8, 8), (8,)), 'x=2', (16, 8), 'f32', axes=['x', None])": WORKS,
    "rs.plan(source='f32[{x}4, 8]', target='f32[16, 8]', mesh=rs.Mesh(x=4), network='h100', budget='1GiB')": WORKS,
    "rs.files.load(saved, NamedSharding(jax_mesh, P()))": ("no tensor ''", "name stored tensors"),
    "rs.files.load(saved, {'w': P()})": ("'w'", "give NamedSharding(mesh, spec)"),
    "rs.jax.redistribute(x, P('y'), out=x)": ("fills all of it", "give no out="),
}

MISTAKES: dict[
    str, tuple[str, str]
] = {  # Names that are misspelt, arguments that are missing or swapped, values that nothing has.
    "rs.Layout.parse('f32[{x}4, 8]')": ("'mesh'", "Layout.parse(source, mesh)"),
    "rs.Layout.parse(mesh, 'f32[{x}4, 8]')": ("'f32[{x}4, 8]'", "write axes as name=size"),
    "rs.Layout.from_spec(mesh, (16, 8), 'f32', ('z',))": ("'z'", "has axes x, y"),
    "rs.Layout.from_spec(mesh=mesh, shape=(16, 8), dtypes='f32', spec=('x',))": ("'dtypes'", "'dtype'"),
    "rs.plan(rows)": ("the target None", "write plan(source, target)"),
    "rs.plan()": ("'source'", "plan(source, target"),
    "rs.plan(rows, columns, bugdet=3)": ("'bugdet'", "did you mean 'budget'?"),
    "rs.plan(rows, columns, network='a100')": ("'a100'", "give one of tpu-v4"),
    "rs.plan('f32[{x}4, 8]', 'f32[16, {x}2]')": ("'f32[{x}4, 8]'", "give the mesh"),
    "rs.plan(mesh, rows, columns)": ("is a Mesh", "a mesh goes in mesh="),
    "rs.plan(P('x'), P(None, 'x'))": ("is a P", "give mesh and shape and dtype"),
    "rs.plan(x.sharding, x.sharding)": ("without shape and dtype", "Layout.from_jax("),
    "rs.plan_tree({'w': (rows, columns)}, bugdet=3)": ("'bugdet'", "did you mean 'budget'?"),
    "rs.plan_tree({'w': rows})": ("w: the layout", "give a (source, target) pair"),
    "rs.Move(rows)": ("'target'", "Move(source, target"),
    "rs.Move(rows, columns, veiw='a b -> b a')": ("'veiw'", "did you mean 'view'?"),
    "rs.simulate({0: np.ones((4, 8), 'f4')}, plan)": ("is a dict, not a plan", "reshard.plan()"),
    "rs.simulate(plan)": ("'tiles'", "simulate(plan, tiles"),
    "rs.jax.redistribute(x)": ("'sharding'", "redistribute(x, sharding"),
    "rs.jax.redistribute(x, P(), bugdet=3)": ("'bugdet'", "did you mean 'budget'?"),
    "rs.jax.redistribute(x, P('q'))": ("P('q',)", "name axes of that mesh"),
    "rs.jax.redistribute(P('x'), x)": ("P('x',) is a P", "write redistribute(x, sharding)"),
    "rs.jax.redistribute(x.sharding, x)": ("is a NamedSharding", "write redistribute(x, sharding)"),
    "rs.jax.redistribute(np.ones((15, 8)), x.sharding)": ("(15, 8)", "pad its dims to sizes that their axes divide"),
    "rs.jax.redistribute(x, P(), source=P('y'))": ("P('x',)", "leave source out"),
    "rs.jax.redistribute(x, P(), budget='lots')": ("'lots'", "e.g. 64MiB"),
    "rs.jax.reshard_pytree({'w': x}, {'w': NamedSharding(jax_mesh, P())}, bugdet=3)": ("'bugdet'", "'budget'"),
    "rs.jax.show(np.zeros(3))": ("has no sharding", "give a jax.Array"),
    "rs.mpi.redistribute(tile, here, there)": ("'comm'", "redistribute(tile, source, target, comm"),
    "rs.mpi.redistribute(tile, here, there, comm, bugdet=3)": ("'bugdet'", "did you mean 'budget'?"),
    "rs.mpi.redistribute(here, there, tile, comm)": ("an array of float32[4, 8]", "(tile, source, target, comm)"),
    "rs.mpi.redistribute(comm, tile, here, there)": ("not a communicator", "MPI.COMM_WORLD"),
    "rs.mpi.redistribute(tile, here, there, 4)": ("comm 4", "MPI.COMM_WORLD"),
    "rs.mpi.redistribute(tile[:2], here, there, comm)": ("(2, 8)", "give this rank's tile"),
    "rs.mpi.redistribute(tile.astype('f8'), here, there, comm)": ("float64", "cast it first"),
    "rs.mpi.prepare(here, there)": ("'comm'", "prepare(source, target, comm"),
    "rs.mpi.prepare(here, there, comm, bugdet=3)": ("'bugdet'", "did you mean 'budget'?"),
    "rs.mpi.prepare(tile, here, there, comm)": ("4 were given", "prepare(source, target, comm"),
    "rs.mpi.DistArray(here, tile)": ("'comm'", "DistArray(layout, tile, comm)"),
    "rs.mpi.DistArray(tile, here, comm)": ("an array of float32[4, 8]", "DistArray(layout, tile, comm)"),
    "rs.mpi.calibrate()": ("'comm'", "calibrate(comm"),
    "rs.files.load('none.safetensors')": ("'targets'", "load(source, targets"),
    "rs.files.save('none', {'w': np.ones(4)}, format='safetensor')": ("'safetensor'", "give safetensors"),
    "rs.files.open('none.safetensors')": ("'none.safetensors'", "give a file or a folder"),
    "rs.names.read('llama')": ("'llama'", "llama-to-megatron"),
    "rs.Layout.parse('f32[{z}4, 8]', mesh)": ("'z'", "has axes x, y"),
    "rs.as_layout(P('x'))": ("P('x',)", "give mesh and shape and dtype"),
    "rs.as_layout(np.ones((4, 4)))": ("an array of float64[4, 4]", "give the layout that it has"),
    "rs.as_layout(mesh)": ("is a Mesh", "a mesh goes in mesh="),
    "rs.Layout.from_jax(x.sharding)": ("NamedSharding(", "Layout.from_jax(sharding, shape, dtype)"),
    "rows.with_local('x')": ("dim 'x'", "give the numbers of two of its 2 dims"),
    "rows.tiles(np.ones((16, 8)))": ("float64[16, 8]", "give float32[16, 8]"),
    "rows.to_jax()": ("'jax_mesh'", "Layout.to_jax(jax_mesh)"),
    "rs.plan(rows, columns).draw('tile')": ("'tile'", "use one of tiles, memory, traffic"),
    "rs.plan(rows, columns, budget='10B')": ("budget 10 B", "the smallest that works is 256 B"),
    "rs.plan(rows, columns, donate='yes')": ("donate 'yes'", "give True or False"),
    "rs.sweep([(rows, columns)], network='h100')": ("'network'", "did you mean 'networks'?"),
    "rs.simulate(plan, {d: np.ones((4, 8)) for d in range(8)})": ("float64", "cast it first"),
    "rs.Network.uniform(1e9)": ("'bandwidth'", "Network.uniform(latency, bandwidth)"),
    "rs.redistribute(rows.tiles(x), columns)": ("tiles by device id", "of the layout source=: give it"),
    "rs.jax.redistribute({'w': x}, {'v': P()})": ("not a prefix", "only the arrays have w"),
    "rs.plan('P()', 'P()', mesh=mesh, shape=(8,))": ("'shape'", "as_layout(it, mesh, shape, dtype)"),
    "rs.sweep([(rows, columns)])['seconds']": ("'seconds'", "[row['seconds'] for row in table]"),
    "rs.Network(latency=1e-6)": ("'latency'", "Network(name, inner, outer"),
    "rs.mpi.DistArray(here, tile, comm).gather_rows([0], cache=1)": ("'cache'", "gather_rows(indices, have"),
    "rs.mpi.DistArray(here, tile, comm).prepare_gather([3], [0]).gather()": ("have_indices=", "gather(held_rows)"),
    "rs.Layout.from_sizes([[2, 2], [8]], 'x=2', (4, 8), 'f4')": ("[[2, 2], [8]]", "Layout.from_chunks("),
    "rs.plan('f32[16]+sum{x}', 'f32[{x}4]', mesh='x=4').to_descriptors()": ("computes", "rs.plan(step.operand"),
    "rs.files.load(saved, {'w': 'bf16[{x}2, 8]'}, mesh='x=2')": ("is not float32", "rs.Move(ckpt['w'].as_stored"),
    "rs.files.load(saved, {'w': '[Partial()]'}, mesh='x=2')": ("+ sum{x}", "a load cannot fill a sum"),
    "rs.files.load(saved, {'*': 'P()'}, mesh='x=2')": ("'*'", "{name: ... for name in ckpt}"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the guesses begin from: the lines of a quickstart."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from mpi4py import MPI

    jax_mesh = jax.make_mesh((4, 2), ("x", "y"))
    x = jax.device_put(np.ones((16, 8), "f4"), NamedSharding(jax_mesh, PartitionSpec("x")))
    mesh, alone = rs.Mesh(x=4, y=2), rs.Mesh(x=1)
    rows, columns = (rs.Layout.parse(text, mesh) for text in ("f32[{x}4, 8]", "f32[16, {x}2]"))
    here, there = (rs.Layout.parse(text, alone) for text in ("f32[{x}4, 8]", "f32[4, {x}8]"))
    given = {"rs": rs, "np": np, "jax": jax, "jnp": jnp, "P": PartitionSpec, "NamedSharding": NamedSharding}
    given |= {"mesh": mesh, "jax_mesh": jax_mesh, "x": x, "rows": rows, "columns": columns}
    folder = str(tmp_path_factory.mktemp("saved"))
    rs.files.save(f"{folder}/checkpoint", {"w": np.ones((4, 8), "f4")})
    given |= {"folder": folder, "saved": f"{folder}/checkpoint"}
    given |= {"plan": rs.plan(rows, columns), "here": here, "there": there, "tile": np.ones((4, 8), "f4")}
    return given | {"comm": MPI.COMM_WORLD}


@pytest.mark.parametrize("guess", [*PYTHON, *MISTAKES])
def test_a_guess_in_python_works_or_names_the_thing_and_the_cure(guess: str, names: dict[str, Any]):
    thing, cure = {**PYTHON, **MISTAKES}[guess]
    if not cure:
        eval(guess, names)
        return
    with pytest.raises(ReshardError) as caught:
        eval(guess, names)
    message = str(caught.value)
    assert thing in message and cure in message, message
    assert len(message) < 700, message


def test_a_call_error_is_a_type_error_and_hides_none_of_the_function(names: dict[str, Any]):
    with pytest.raises(TypeError, match="'bugdet'"):
        eval("rs.plan(rows, columns, bugdet=3)", names)
    # What the function itself raises stays as it is, also where that is a TypeError.
    with pytest.raises(TypeError, match="can only concatenate") as caught:
        name_arguments(lambda text: text + 1)("a")
    assert not isinstance(caught.value, ReshardError)


def test_other_guesses(names: dict[str, Any]):
    plan = names["plan"]
    assert repr(plan) == "<Plan f32[{x}4, 8] -> f32[16, {x}2]: all_to_all; received 96 B, 1 launch>"
    assert repr(rs.plan_tree({"w": (names["rows"], names["columns"])})) == (
        "<TreePlan 1 move in 1 batch: received 96 B, 1 launch>"
    )
    assert len(str(plan).splitlines()) == 4
    with rs.jax.enable() as log:
        names["jax"].jit(lambda v: v + 1)(2.0)
    assert "no module" in str(log)
    table = rs.sweep([(names["rows"], names["columns"])] * 45)
    assert len(str(table).splitlines()) == 22 and "... 25 more" in str(table)
    with pytest.raises(AttributeError, match="to_csv and to_pandas"):
        getattr(table, "to_json")  # noqa: B009
    for mistake, cure in {
        "array[[0, 5]]": "a.gather_rows(",
        "array.take([0])": "a.gather_rows(",
        "np.take(array, [0])": "a.gather_rows(",
        "np.roll(array, 1)": "a.halo(width)",
    }.items():
        with pytest.raises(TypeError, match=re.escape(cure)):
            eval(mistake, names | {"array": rs.mpi.DistArray(names["here"], names["tile"], names["comm"])})
    from reshard.jax.xla_pass.xla_hook import is_on

    assert not is_on()
    with pytest.raises(AttributeError, match="'Mesh'"):
        getattr(rs, "mesh")  # noqa: B009


PAIR = "f32[{x}4] f32[16]"
COMMANDS: dict[str, tuple[str, str]] = {  # words with spaces between them, as a shell hands them over: without quotes
    "--help": WORKS,
    "plan --help": WORKS,
    f"plan --mesh x=4 {PAIR}": WORKS,
    f"plan --mesh=x=4 {PAIR} --json": WORKS,
    f"plan {PAIR} --mesh x=4": WORKS,
    f"plan --mesh x=4 {PAIR} --budget 64MB --network h100": WORKS,
    "plan --mesh x=4 P('x',None) P(None,'x') --shape 16,16 --dtype f32": WORKS,
    f"show --mesh x=4 {PAIR.split()[0]}": WORKS,
    "show --mesh x=4 P('x') --shape 16 --dtype f32": WORKS,
    f"simulate --mesh x=4 {PAIR}": WORKS,
    f"prove --mesh x=4 {PAIR}": WORKS,
    "completion bash": WORKS,
    "help": WORKS,
    "version": WORKS,
    f"plan -m x=4 {PAIR}": WORKS,
    f"plan --mesh 4 {PAIR}": ("'4'", "write axes as name=size"),
    f"plan --mesh x:4 {PAIR}": WORKS,
    "plan --mesh x=4 P(x,None) P() --shape 16,16 --dtype f32": ("'x'", "\"P('x', None)\""),
    "plan --mesh x=4 x None": ("'x'", "write f32[{x}8, 16], P('x', None)"),
    "plan --mesh x=4 f32[x4] f32[16]": ("'x4'", "digits like {x}4"),
    "plan --mesh x=4 f32[{x}4] -> f32[16]": ("-> f32[16]", "put quotes around a layout"),
    f"verify --mesh x=4 {PAIR}": ("'verify'", "prove"),
    "-h": WORKS,
    "plan -h": WORKS,
    "plan --mesh x:4,y:2 f32[{x}4] f32[16]": WORKS,
    "plan --mesh <x=4> f32[{x}4] f32[16]": WORKS,
    "plan --mesh {'x':4} f32[{x}4] f32[16]": WORKS,
    "plan --mesh x=4,y=2 f32[{x}4,{y}4] f32[16,8]": WORKS,
    "plan --mesh x=4 f32[{x}4] P()": WORKS,
    "plan --mesh x=4 P('x') P() --shape 16x16 --dtype bf16": WORKS,
    "plan --mesh x=4 P('x') P() --shape (16,16) --dtype bf16": WORKS,
    "plan --mesh x=4 ('x',None) (None,'x') --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 ['x',None] [None,'x'] --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 [Shard(0)] [Shard(1)] --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 Shard(0) Replicate() --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 S(0) R --shape 16,16 --dtype f32": WORKS,
    'plan --mesh x=4 [{"x"},{}] [{},{"x"}] --shape 16,16 --dtype f32': WORKS,
    "plan {devices=[4,1]<=[4]} {devices=[1,4]<=[4]} --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 {devices=[4,1]<=[4]} P() --shape 16,16 --dtype f32": WORKS,
    "plan --mesh x=4 --target-mesh y=2 f32[{x}4] f32[{y}8]": WORKS,
    "plan --mesh x=4 f32[16]+sum{x} f32[{x}4]": WORKS,
    "simulate --mesh x=4 P('x') P() --shape 16 --dtype f32": WORKS,
    "prove --mesh x=4 P('x') P() --shape 16 --dtype f32": WORKS,
    "show --mesh x=4 f32[{x}4] --limit 4": WORKS,
    "show --mesh x=4 f32[{x}(1,2,3,4)]": WORKS,
    "show {devices=[4,1]<=[4]} --shape 16,16 --dtype f32": WORKS,
    "show -m x=4 S(0) --shape 16 --dtype f32": WORKS,
    "run --help": WORKS,
    "files --help": WORKS,
    "files show --help": WORKS,
    "plan --mesh x=4 --json f32[{x}4] f32[16]": WORKS,
    "plan --mesh x=4 f32[{x}4,8] f32[16,{x}2] --network none": WORKS,
    "plan --mesh x=4 f32[{x}4] f32[16] --bud 1GB": WORKS,
    "plan --mesh x4 f32[{x}4] f32[16]": ("'x4'", "write axes as name=size"),
    "plan --mesh x=4 f32[{x}4] f32[16] --csv": ("--csv", "give --batch FILE"),
    "plans --mesh x=4 f32[{x}4] f32[16]": ("'plans'", "did you mean 'plan'?"),
    "files ls none": ("'files ls'", "did you mean 'files show'?"),
    "plan --mesh x=4 f32[{x}4,8] P(None,'x') --network h100 --budget 1MiB": WORKS,
    "show --mesh x=4,y=2 P(('x','y')) --shape 16 --dtype f32": WORKS,
    "plan --mesh data=4 f32[{data}4] f32[16]": WORKS,
    "plan --mesh x=4 i32[{x}4] i32[16]": WORKS,
    "plan --mesh x=4 f32[{x}~10] f32[10]": WORKS,
    "plan --mesh x=4 --shape=16 --dtype=f32 PartitionSpec('x') PartitionSpec()": WORKS,
    "plan --mesh x=4 Partial() Replicate() --shape 16 --dtype f32": WORKS,
    "plan --mesh x=4 f32[{x}4,16] f32[16,{x}4] --network tpu-v6e --explain": WORKS,
    "plan --mesh x=4 P(sum) R --shape 16 --dtype f32": ("'sum'", "P('x', None)"),
    "plan --mesh x=4 y=2 f32[{x}4] f32[16]": ("f32[16]", "put quotes around a layout"),
}

WRONG_COMMANDS: dict[str, tuple[str, str]] = {  # The same on the command line.
    "plan": ("SOURCE and TARGET", "--batch FILE"),
    "files docs": ("'files docs'", "files show docs"),
    f"plan {PAIR}": ("'f32[{x}4]'", "give the mesh: --mesh x=4,y=2"),
    f"plan --mesh x=4 {PAIR} --bugdet 3": ("'--bugdet'", "did you mean '--budget'?"),
    f"plan --mesh x=4 {PAIR} --network tpu": ("'tpu'", "did you mean 'tpu-v4'?"),
    "show f32[{x}4]": ("'f32[{x}4]'", "give the mesh"),
    "show --mesh x=4 P('x') --shape 16": ("without dtype", "--dtype f32"),
    "doctor": ("FILE", "reshard doctor --help"),
    "doctor README.md": ("README.md is not a program", "give optimized HLO"),
    "doctor .": (". has no file *after_optimizations.txt", "give optimized HLO"),
    "pass README.md": ("README.md is not a program", "StableHLO"),
    "run none.py": ("-n", "reshard run --help"),
    "run -n 4": ("nothing to run", "give a script"),
    "run -np 4 none.py": ("'none.py'", "give the path of one"),
    "load none.safetensors": ("--mesh", "reshard load --help"),
    "files": ("COMMAND", "reshard files --help"),
    "files show none.safetensors": ("'none.safetensors'", "give a file or a folder"),
    "files check README.md": ("README.md", "give a checkpoint's file or folder"),
    "completion powershell": ("'powershell'", "'fish'"),
    "plan --mesh x=4 f32[{x}4] f32[16] --budget 10": ("budget 10 B", "the smallest that works is 80 B"),
    "plan --mesh x=4 f32[{x}4] bf16[16]": ("bfloat16", "cast"),
    "plan --mesh x=4 f32[{x}4,2] f32[{x}4,3]": ("(16, 3)", "global shape"),
    "plan --mesh x=4 f32[{z}4] f32[16]": ("'z'", "has axes x"),
    "plan --batch none.jsonl": ("'none.jsonl'", "give a file of JSON lines"),
    f"pln {PAIR}": ("'pln'", "did you mean 'plan'?"),
    "--verson": ("'--verson'", "did you mean '--version'?"),
    f"plan --mseh x=4 {PAIR}": ("'--mseh'", "did you mean '--mesh'?"),
    f"plan --mesh x=4 {PAIR} --bugdet=1MiB": ("'--bugdet'", "did you mean '--budget'?"),
    "plan --mesh x=4 f32[{x}4, 16] f32[16]": ("f32[16]", "put quotes around a layout"),
    "plan --mesh x=4 f32[{x}4]": ("SOURCE and TARGET", "--batch FILE"),
    "plan --mesh data=4 f32[{dta}4] f32[16]": ("unknown axis 'dta'", "did you mean 'data'?"),
    f"plan --mesh x=four {PAIR}": ("'x=four'", "write axes as name=size"),
    f"plan --mesh x=0 {PAIR}": ("axis 'x' has size 0", "at least 1"),
    f"plan --mesh x=4,x=2 {PAIR}": ("occurs twice", "give every axis its own name"),
    "plan --mesh x=4 f32[{x}4 f32[16]": ("'f32[{x}4'", "write dtype[dims]"),
    "plan --mesh x=4 f3[{x}4] f32[16]": ("dtype 'f3'", "use a numpy name (float32)"),
    "plan --mesh x=4 f32[{x}{x}4] f32[64]": ("axis 'x'", "use every part of an axis once"),
    "plan --mesh x=4 f32[4]+som{x} f32[4]": ("'som'", "use one of sum"),
    f"plan --mesh x=4 {PAIR} --budget lots": ("'lots'", "e.g. 64MiB"),
    f"plan --mesh x=4 {PAIR} --network tpu-v5": ("'tpu-v5'", "did you mean 'tpu-v5p'?"),
    f"plan --mesh x=4 {PAIR} --slack lots": ("slack 'lots'", "e.g. 0.05"),
    "plan --mesh x=4 P('x' P() --shape 16 --dtype f32": ("\"P('x'\"", "write P('x', None)"),
    f"plan --mesh x=4 {PAIR} --html /nowhere/a.html": ("/nowhere/a.html", "give a file in a folder that is there"),
    "plan --mesh x=4 f32[{x}24,5] f32[3,{x}8,5] --view (three->h": ("'(three->h'", "as in (a b)"),
    "plan --mesh x=4 f32[{x}24] f32[{x}24] --view h->h --size i=3": ("'i'", "its atoms are h"),
    "show --mesh x=4 f32[{x}4] --limit 0": ("--limit 0", "at least 1 row"),
    "doctor none.mlir": ("none.mlir", "give optimized HLO"),
}


@pytest.mark.parametrize("typed", [*COMMANDS, *WRONG_COMMANDS])
def test_a_guess_on_the_command_line_works_or_names_the_thing_and_the_cure(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(__file__).parent.parent)
    thing, cure = {**COMMANDS, **WRONG_COMMANDS}[typed]
    try:
        code = main(typed.split())
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr()
    if not cure:
        assert not code and shown.out and not shown.err
        return
    assert code == 2 and not shown.out
    assert shown.err.startswith("reshard: error: ") and shown.err.count("\n") == 1
    assert thing in shown.err and cure in shown.err, shown.err


MISSING = {  # of a library that is not there: what is typed, and what installs it
    ("jax", "import reshard.jax"): "ImportError: reshard.jax needs jax: pip install jax",
    ("mpi4py", "from reshard.cli import main; main(['calibrate'])"): "pip install mpi4py, and mpich",
    ("mpi4py", "from reshard.cli import main; main(['run', '-n', '2', 'setup.py'])"): "pip install mpi4py, and mpich",
}


HIDE = """
import sys
class Finder:
    def __init__(self, inner): self.inner = inner
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] == {library!r} else self.inner.find_spec(name, *rest)
sys.meta_path[:] = [Finder(inner) for inner in sys.meta_path]
{typed}
"""


def test_a_library_that_is_not_there_is_named_and_how_to_install_it():
    for (library, typed), cure in MISSING.items():
        code = HIDE.format(library=library, typed=typed)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert cure in run.stderr.strip().splitlines()[-1], run.stderr
        assert ("Traceback" in run.stderr) == (library == "jax")  # The command shows none.


def test_no_text_installs_what_is_not_published():
    root = Path(__file__).parent.parent
    for folder in ("reshard", "docs", "examples", "notebooks"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".ipynb") and path.is_file():
                assert "install 'reshard[" not in path.read_text(encoding="utf-8"), path
