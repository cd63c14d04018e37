"""What XLA's own partitioner does with a redistribution: the jit identity, compiled on virtual CPU devices.

`xla_identities` compiles `lambda v: v` from each source sharding to its target in one fresh process, so that
the caller's jax, if it has one, is not touched, and reads the optimized HLO back: which collectives, how many
bytes they receive, how many temporary bytes, and whether a device ever holds the whole array. Nothing is run.

XLA on CPU carries bfloat16 through its collectives as float32. Compare in float32, or mind the factor of two.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from reshard.errors import LayoutError, ReshardError
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis

WARNING = "Involuntary full rematerialization"
KINDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter", "ragged-all-to-all")


class XlaError(ReshardError):
    """XLA could not be asked: jax is missing, or its process failed."""


@dataclass(frozen=True)
class Identity:
    """The compiled identity, in bytes on one device; `collectives` counts each kind, in the order of the HLO.

    `received` follows from shapes and groups alone; peak is arguments, output and temporaries together.
    """

    jax: str
    collectives: dict[str, int]
    received: int
    temp: int
    peak: int
    holds_whole_array: bool
    warned: bool


def xla_identity(source: Layout, target: Layout, timeout: float = 300) -> Identity:
    """`xla_identities` of one pair."""
    return xla_identities([(source, target)], timeout)[0]


def xla_identities(pairs: Iterable[tuple[Layout, Layout]], timeout: float = 300) -> list[Identity]:
    """What XLA compiles for each pair, in order.

    Raises `LayoutError` for layouts that no `NamedSharding` says (local digits before held ones, uneven or
    partial arrays, two meshes), and `XlaError` if jax is missing or fails.
    """
    asked = [_question(source, target) for source, target in pairs]
    if not asked:
        return []
    try:
        run = subprocess.run(
            [sys.executable, os.path.abspath(__file__)],
            input=json.dumps(asked),
            env=_environment(max(math.prod(question["sizes"]) for question in asked)),
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise XlaError(
            f"XLA had not compiled {len(asked)} pairs after {timeout:.0f} s; ask for fewer at once"
        ) from None
    if run.returncode:
        raise XlaError(f"the process that asks XLA failed, with status {run.returncode}:\n{run.stderr[-2000:]}")
    return [Identity(**answer) for answer in json.loads(run.stdout.splitlines()[-1])]


def _environment(devices: int) -> dict[str, str]:
    """The child's environment: so many CPU devices, warnings on, and this package where the parent has it."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "host_platform_device_count" not in flag]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
    }


def _question(source: Layout, target: Layout) -> dict[str, Any]:
    """A pair as plain data, on a mesh whose axes are cut so that every sub-axis is whole axes."""
    if (source.shape, source.dtype, source.mesh) != (target.shape, target.dtype, target.mesh):
        raise LayoutError(f"{source} on {source.mesh} and {target} on {target.mesh}: give one array on one mesh")
    mesh = source.mesh
    cuts = _cuts(mesh, (*source.held, *target.held))
    return {
        "names": [f"{axis}_{at}" for axis, parts in cuts.items() for at in range(len(parts))],
        "sizes": [high // low for parts in cuts.values() for low, high in parts],
        "ids": [sorted(mesh.devices).index(device) for device in mesh.devices],
        "shape": source.shape,
        "dtype": source.dtype,
        "specs": [_spec(source, cuts), _spec(target, cuts)],
    }


Cuts = dict[str, list[tuple[int, int]]]
"""Per axis its parts, each as the prefix before it and after it."""


def _cuts(mesh: Mesh, held: Sequence[SubAxis]) -> Cuts:
    found: Cuts = {}
    for axis, size in mesh.axes.items():
        ends = {1, size, *(end for s in held if s.axis == axis for end in (s.pre, s.pre * s.size))}
        places = sorted(ends)
        if any(high % low for low, high in pairwise(places)):
            raise LayoutError(f"the sub-axes of {axis} of mesh {mesh} that the layouts use cannot be axes of one mesh")
        found[axis] = list(pairwise(places)) or [(1, 1)]
    return found


def _spec(layout: Layout, cuts: Cuts) -> list[list[str]]:
    held = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    if layout.partial or not layout.even or Layout.tiled(layout.mesh, layout.shape, layout.dtype, held) != layout:
        raise LayoutError(f"{layout}: jit takes contiguous, even, finished arrays only; ask XLA for such a layout")
    return [[name for sub in axes for name in _names(sub, cuts[sub.axis])] for axes in held]


def _names(sub: SubAxis, parts: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{sub.axis}_{at}" for at, (low, high) in enumerate(parts) if sub.pre <= low and high <= sub.pre * sub.size]


# ---- the optimized HLO -----------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def collectives(hlo: str) -> list[tuple[str, int]]:
    """The collectives of an HLO module in its order, each with the bytes that one device receives.

    >>> collectives("%b = f32[8]{0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}")
    [('all-gather', 24)]
    """
    found: list[tuple[str, int]] = []
    for _, shape, op, rest in _INSTRUCTION.findall(hlo):
        if op.removesuffix("-start") in KINDS:
            if op.endswith("-start"):
                raise XlaError(f"{op}: asynchronous collectives are not read here; compile for CPU")
            found.append((op, _received(op, _nbytes(shape), rest)))
    return found


def _received(op: str, result: int, rest: str) -> int:
    if op == "collective-permute":
        return result
    group = _group(rest)
    if op == "reduce-scatter":
        return result * (group - 1)
    return result * (group - 1) * (2 if op == "all-reduce" else 1) // group


def _group(rest: str) -> int:
    """The devices in one replica group, in each of the spellings that XLA has."""
    if listed := _LISTED.search(rest):
        return len(listed[1].split(","))
    if iota := _IOTA.search(rest):
        return int(iota[2])
    if mesh := _MESH.search(rest):
        sizes = {name.strip(" '\""): int(size) for name, size in (part.split("=") for part in mesh[1].split(","))}
        axes = [part.strip().partition(":(") for part in mesh[2].split(",")]
        return math.prod(int(part.rpartition(")")[2]) if part else sizes[name.strip("'\"")] for name, _, part in axes)
    raise XlaError(f"cannot read the replica groups of {rest[:300]!r}")


def _arrays(shape: str) -> list[tuple[str, int]]:
    return [(dtype, math.prod(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(shape)]


def _nbytes(shape: str) -> int:
    return sum(dtypes.nbytes(count, dtypes.canonical(dtype)) for dtype, count in _arrays(shape))


def _largest(hlo: str) -> int:
    """Elements of the largest array in the module."""
    return max((n for _, shape, _, _ in _INSTRUCTION.findall(hlo) for _, n in _arrays(shape)), default=0)


# ---- the process that has jax ----------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> Identity:
    import jax
    import numpy as np
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec

    devices = np.array(jax.devices())[question["ids"]].reshape(question["sizes"])
    mesh = JaxMesh(devices, question["names"])
    before, after = (NamedSharding(mesh, PartitionSpec(*map(tuple, spec))) for spec in question["specs"])
    shape = tuple(question["shape"])
    argument = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(question["dtype"]), sharding=before)
    with tempfile.TemporaryFile() as log, _stderr_to(log.fileno()):
        compiled = jax.jit(lambda v: v, out_shardings=after).lower(argument).compile()
        log.seek(0)
        warned = WARNING.encode() in log.read()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    done = collectives(hlo)
    temp = memory.temp_size_in_bytes
    return Identity(
        jax.__version__,
        dict(Counter(kind for kind, _ in done)),
        sum(received for _, received in done),
        temp,
        memory.argument_size_in_bytes + memory.output_size_in_bytes + temp - memory.alias_size_in_bytes,
        _largest(hlo) >= math.prod(shape),
        warned,
    )


class _stderr_to:
    """Sends what C++ writes to standard error to another file."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __enter__(self) -> None:
        self.kept = os.dup(2)
        os.dup2(self.file, 2)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.kept, 2)
        os.close(self.kept)


def _main() -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)  # a cached executable would give no warning
    answers = [asdict(_answer(question)) for question in json.load(sys.stdin)]
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
