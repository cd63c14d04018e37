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
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from reshard import hlo
from reshard.errors import LayoutError, NotationError, ReshardError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis

WARNING = "Involuntary full rematerialization"


class XlaError(ReshardError):
    """XLA did not compile: jax is missing, or its process failed."""


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
    questions = [_question(source, target) for source, target in pairs]
    if not questions:
        return []
    try:
        run = subprocess.run(
            [sys.executable, os.path.abspath(__file__)],
            input=json.dumps(questions),
            env=_environment(max(math.prod(question["sizes"]) for question in questions)),
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise XlaError(
            f"XLA had not compiled {len(questions)} pairs after {timeout:.0f} s; ask for fewer at once"
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
    cuts: Cuts = {}
    for axis, size in mesh.axes.items():
        ends = {1, size, *(end for s in held if s.axis == axis for end in (s.pre, s.pre * s.size))}
        places = sorted(ends)
        if any(high % low for low, high in pairwise(places)):
            raise LayoutError(f"the sub-axes of {axis} of mesh {mesh} that the layouts use cannot be axes of one mesh")
        cuts[axis] = list(pairwise(places)) or [(1, 1)]
    return cuts


def _spec(layout: Layout, cuts: Cuts) -> list[list[str]]:
    held = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    if layout.partial or not layout.even or Layout.tiled(layout.mesh, layout.shape, layout.dtype, held) != layout:
        raise LayoutError(f"{layout}: jit takes contiguous, even, finished arrays only; ask XLA for such a layout")
    return [[name for sub in axes for name in _names(sub, cuts[sub.axis])] for axes in held]


def _names(sub: SubAxis, parts: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{sub.axis}_{at}" for at, (low, high) in enumerate(parts) if sub.pre <= low and high <= sub.pre * sub.size]


# ---- the optimized HLO -----------------------------------------------------------------------------

_FRAGMENT = "HloModule fragment\n\nENTRY %main {{\n{}\n}}"


def collectives(text: str) -> list[tuple[str, int]]:
    """The collectives of an HLO module, or of lines of one, each with the bytes that one device receives.

    >>> collectives("%b = f32[8]{0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}")
    [('all-gather', 24)]
    """
    whole = text if "HloModule" in text else _FRAGMENT.format("\n".join(f"  {line}" for line in text.splitlines()))
    try:
        listed = hlo.collectives(hlo.parse(whole))
    except NotationError as error:
        raise XlaError(str(error)) from error
    return [(one.opcode.removesuffix("-start"), one.received_bytes) for one in listed]


def _largest(text: str) -> int:
    """Elements of the largest array in the module."""
    computations = hlo.parse(text).computations.values()
    made = [
        array for one in computations for each in one.instructions if each.opcode != "bitcast" for array in each.results
    ]
    largest = max(made, key=lambda array: array.elements, default=None)
    return largest.elements if largest else 0


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
    memory, text = compiled.memory_analysis(), compiled.as_text()
    done = collectives(text)
    temp = memory.temp_size_in_bytes
    return Identity(
        jax.__version__,
        dict(Counter(kind for kind, _ in done)),
        sum(received for _, received in done),
        temp,
        memory.argument_size_in_bytes + memory.output_size_in_bytes + temp - memory.alias_size_in_bytes,
        _largest(text) >= math.prod(shape),
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
