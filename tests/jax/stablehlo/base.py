"""What a case of the corpus is, and operations written as text, for those that `jax.lax` does not make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from reshard.lower.to_stablehlo import list_operations

SHAPE = (16, 16)
ABORTS = "the process ends"
Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class OpCase:
    """A function of one `f32[16, 16]` in (0, 1), whose program has the operation `name` of StableHLO.

    `variant` tells several cases of one operation apart. `refused` has what plain JAX says where it cannot compile the
    function, by platform ("cpu", "tpu", or "tpu 0.12" for one version of jax): a regular expression, or `ABORTS`.
    `left` is why the pass leaves the program as it is. A case that `waits` needs a host at its side: it is compiled and
    not run. A case is compiled together with others, unless it stands `alone`.
    """

    name: str
    function: Function = field(repr=False)
    variant: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    left: str = ""
    waits: bool = False
    alone: bool = False
    needs_mesh: bool = False
    tolerance: float = 1e-5

    @property
    def operation(self) -> str:
        """The name of the operation with its dialect, which is StableHLO unless the name has another."""
        return self.name if "." in self.name else f"stablehlo.{self.name}"

    def refused_on(self, platform: str) -> str | None:
        """What plain JAX of this version says on a platform; None where it compiles the function."""
        version = ".".join(jax.__version__.split(".")[:2])
        return self.refused.get(platform, self.refused.get(f"{platform} {version}"))

    @property
    def title(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


_ELEMENTS = {"float32": "f32", "int32": "i32"}
_emit = Primitive("emit")
_emit.multiple_results = True


def emit(body: str, *operands: jax.Array, out: Sequence[tuple[Any, ...]]) -> Any:
    """The results of StableHLO text, whose operands are `%0`, `%1` ... and which ends with a `return`.

    `out` has a dtype and the sizes for each result.
    """
    results = tuple(jax.core.ShapedArray(tuple(shape), jnp.dtype(dtype)) for dtype, *shape in out)
    values = _emit.bind(*operands, body=body, results=results)
    return values if len(values) != 1 else values[0]


@_emit.def_abstract_eval
def _abstract(*operands: Any, body: str, results: Any) -> Any:
    return results


def _lower(ctx: Any, *operands: Any, body: str, results: Any) -> Any:
    arguments = ", ".join(f"%{at}: {operand.type}" for at, operand in enumerate(operands))
    types = ", ".join(
        f"tensor<{'x'.join([*map(str, result.shape), _ELEMENTS[result.dtype.name]])}>" for result in results
    )
    module = ir.Module.parse(f"func.func @main({arguments}) -> ({types}) {{\n{body}\n}}")
    block = module.body.operations[0].regions[0].blocks[0]
    values = dict(zip(block.arguments, operands, strict=True))
    *operations, last = (op.operation for op in block.operations)
    for op in operations:
        copy = op.clone(ir.InsertionPoint.current)
        for inner in (copy, *list_operations(copy)):  # A region may use what is outside of it.
            for at, operand in enumerate(inner.operands):
                inner.operands[at] = values.get(operand, operand)
        values.update(zip(op.results, copy.results, strict=True))
    return [values[operand] for operand in last.operands]


mlir.register_lowering(_emit, _lower)
