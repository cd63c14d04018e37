"""Compiles small sharded programs and prints their HLO as JSON: `python record.py cpu [program ...]`.

With `--write` it writes the texts in `data`, one for each program, platform and version of jax:

    cpu, v5p:2x2x2, v5e:2x4, tpu7x:2x2x1, and v5p:2x2x1 with --slices=2        (TPU ones need libtpu, but no TPU)

The texts are shortened: `backend_config` stays only on instructions that may need it, and the folder of this file
is dropped.
"""

import json
import os
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # otherwise two processes at once fail at libtpu's lock file
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

DATA = Path(__file__).resolve().parent / "data"
_CONFIG = re.compile(r", backend_config=\{.*\}$", re.MULTILINE)
_NEEDED = re.compile(r" (?:while|conditional|all-\w+|reduce-scatter|collective-permute|call)[\w-]*\(")


def gather(at):
    import jax

    return jax.jit(lambda v: v * 2, out_shardings=at()), at.array("x", None)


def swap(at):
    import jax

    return jax.jit(lambda v: v * 2, out_shardings=at(("y", "x"))), at.array(("x", "y"), None)


def scatter(at):
    import jax

    dims = 1024, 1024  # if smaller, TPU makes it an all-reduce
    arrays = at.array("x", "y", dims=dims), at.array("y", None, dims=dims)
    return jax.jit(lambda v, w: v @ w, out_shardings=at("x", "y")), *arrays


def kinds(at):
    import jax

    def body(v):
        size = at.mesh.shape["x"]
        gathered = jax.lax.all_gather(v, "x", tiled=True)
        shifted = jax.lax.ppermute(v, "x", [(0, 1)])
        kept = jax.lax.ppermute(v, "y", [(0, 0), (1, 1)])
        swapped = jax.lax.all_to_all(v, ("y", "x"), 1, 0, tiled=True)
        summed = jax.lax.psum_scatter(v, "x", scatter_dimension=0, tiled=True)
        return gathered.reshape(size, *v.shape).sum(0) + shifted + kept, swapped, summed, jax.lax.pmax(v, "y")

    return at.mapped(body, at("x", "y").spec), at.array("x", "y")


def ring(at):
    import jax

    def turn(v):
        size = at.mesh.shape["x"]
        around = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.ppermute(c, "x", around), v)

    def body(v):
        return jax.lax.scan(lambda c, _: (turn(c) + 1, None), v, None, length=3)[0]

    return at.mapped(body, at("x").spec), at.array("x", None)


def branch(at):
    import jax

    def cheap(v):
        return jax.lax.psum(v[:1, :1], "x") + v

    def costly(v):
        return jax.lax.ppermute(jax.lax.psum(v, "x"), "y", [(0, 1), (1, 0)])

    def body(which, v):
        return jax.lax.cond(which > 0, costly, cheap, v)

    which = jax.ShapeDtypeStruct((), "int32", sharding=at())
    return at.mapped(body, at().spec, at("x").spec), which, at.array("x", None)


def endless(at):
    import jax

    def body(v):
        total = jax.lax.psum(v.sum(), "x")
        return jax.lax.while_loop(lambda c: c[0] < 1e6, lambda c: (c[0] * 2, jax.lax.psum(c[1], "y")), (total, v))[1]

    return at.mapped(body, at("x").spec), at.array("x", None)


def overlap(at):
    import jax

    def layers(v, w, u):
        pin = jax.lax.with_sharding_constraint
        return pin(pin(v @ pin(w, at(None, "y")), at("x", "y")) @ pin(u, at("y", None)), at("x", None))

    dims = 4096, 4096
    arrays = at.array("x", None, dims=dims), at.array("x", "y", dims=dims), at.array("y", "x", dims=dims)
    return jax.jit(layers), *arrays


PROGRAMS = {f.__name__: f for f in (gather, swap, scatter, kinds, ring, branch, endless, overlap)}


class At:
    """A mesh of x by 2 devices; `at("x", None)` is a sharding on it."""

    def __init__(self, platform, slices):
        import jax
        import numpy as np
        from jax.experimental import topologies

        if platform == "cpu":
            devices = jax.devices()
        else:
            more = {"num_slices": slices} if slices > 1 else {}
            devices = topologies.get_topology_desc(platform, platform="tpu", **more).devices
            devices = sorted(devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
        self.dtype = "float32" if platform == "cpu" or slices > 1 else "bfloat16"
        self.mesh = jax.sharding.Mesh(np.array(devices).reshape(-1, 2), ("x", "y"))

    def __call__(self, *spec):
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def mapped(self, body, *specs):
        import jax

        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=specs[-1], check_vma=False))

    def array(self, *spec, dims=(256, 256)):
        import jax

        return jax.ShapeDtypeStruct(dims, self.dtype, sharding=self(*spec))


def compiled(program, at):
    jitted, *arrays = program(at)
    return shorten(jitted.lower(*arrays).compile().as_text())


def shorten(text):
    lines = (line if _NEEDED.search(line) else _CONFIG.sub("", line) for line in text.splitlines())
    return "\n".join(lines).replace(f"{Path(__file__).resolve().parent}{os.sep}", "") + "\n"


def main(platform, *arguments):
    import jax

    names = [name for name in arguments if not name.startswith("--")]
    slices = next((int(option.partition("=")[2]) for option in arguments if option.startswith("--slices=")), 1)
    at = At(platform, slices)
    texts = {name: compiled(PROGRAMS[name], at) for name in names or PROGRAMS}
    if "--write" not in arguments:
        return print(json.dumps(texts))
    where = f"{platform.partition(':')[0]}{f'-{slices}slices' if slices > 1 else ''}_{jax.__version__}"
    for name, text in texts.items():
        (DATA / f"{name}_{where}.hlo").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
