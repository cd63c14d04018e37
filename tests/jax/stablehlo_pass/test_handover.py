"""What XLA gets: shardings where JAX itself writes them, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.mlir import make_ir_context
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax.stablehlo_pass import module_pass
from reshard.jax.stablehlo_pass.explicit_reshards import make_explicit
from reshard.jax.stablehlo_pass.module_pass import transform
from reshard.jax.stablehlo_pass.rewrite import inside_manual
from reshard.lower.to_stablehlo import Module, Operation, ir, list_operations
from tests.jax.modules import COLUMNS, ROWS, SPLIT, TYPE, constraint, module, uneven
from tests.jax.programs import BY_NAME
from tests.jax.stablehlo.worker import USUAL, sharding_forms

CALL = f"""func.func private @inner(%v: {TYPE}) -> {TYPE} {{
  %w = stablehlo.sine %v : {TYPE}
  return %w : {TYPE}
}}"""


def called(private: str, source: str = '[{"x"}, {"y"}]') -> str:
    """A reshard, then a call of `@inner`."""
    body = f"{constraint(COLUMNS, result='%b')}\n%r = func.call @inner(%b) : ({TYPE}) -> {TYPE}"
    return f"{module(body, source)}\n{private}"


def parsed(text: str) -> Module:
    return ir.Module.parse(text, make_ir_context())


def named(transformed: Module, name: str) -> list[Operation]:
    return [op for op in list_operations(transformed.operation) if op.name == name]


def test_private_functions_get_no_shardings() -> None:
    """Propagation writes them there, and libtpu aborts on a complex result with one."""
    between = parsed(called(CALL))
    make_explicit(between)
    assert '"private" function' in sharding_forms(between)
    result = transform(called(CALL))
    assert len(result.report.taken) == 1 and sharding_forms(result.module) <= USUAL


def test_operations_keep_the_shardings_of_the_program() -> None:
    """The cosine is moved by the pass, so that the sine's own sharding stays where it was."""
    given = f"{{sdy.sharding = #sdy.sharding_per_value<[<@mesh, {SPLIT}>]>}}"
    body = f"%b = stablehlo.sine %a {given} : {TYPE}\n%c = stablehlo.cosine %b : {TYPE}\n{constraint(COLUMNS, '%c')}"
    result = transform(module(body, SPLIT))
    (sine,), (cosine,) = (named(result.module, f"stablehlo.{name}") for name in ("sine", "cosine"))
    assert '<@mesh, [{}, {"x"}]>' in str(sine.attributes["sdy.sharding"])
    assert "sdy.sharding" not in cosine.attributes


def test_an_operation_beside_a_taken_reshard_keeps_its_sharding_as_a_constraint() -> None:
    """Propagation would compute the sine where the result goes; the plan moves it after the sine."""
    result = transform(module(f"%b = stablehlo.sine %a : {TYPE}\n{constraint(COLUMNS, '%b')}"))
    (sine,) = named(result.module, "stablehlo.sine")
    (use,) = sine.results[0].uses
    pin = use.owner.operation
    assert "sdy.sharding" not in sine.attributes and pin.name == "sdy.sharding_constraint"
    assert str(pin.attributes["sharding"]) == '#sdy.sharding<@mesh, [{"x"}, {"y"}]>'
    assert [each.owner.operation.name for each in pin.results[0].uses] == ["sdy.manual_computation"]


def test_padded_tiles_are_constrained() -> None:
    result = transform(uneven('[{"x"}, {}]', SPLIT, 10))
    made = named(result.module, "stablehlo.pad") + named(result.module, "stablehlo.slice")
    users = [use.owner.operation for op in made for use in op.results[0].uses if not inside_manual(op)]
    assert users and {user.name for user in users} == {"sdy.sharding_constraint"}
    assert '#sdy.sharding<@mesh, [{"x"}, {}]>' in [str(user.attributes["sharding"]) for user in users]
    assert sharding_forms(result.module) <= USUAL


def test_a_loop_of_the_program_loses_its_sharding() -> None:
    """XLA cannot import it: it hoists the loop's invariants with it."""
    body = f"""%k = stablehlo.constant dense<false> : tensor<i1>
      %w:2 = stablehlo.while(%v = %a, %p = %k) : {TYPE}, tensor<i1>
        attributes {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, {ROWS}>, <@mesh, []>]>}}
        cond {{ stablehlo.return %p : tensor<i1> }}
        do {{
          %s = stablehlo.sine %v : {TYPE}
          stablehlo.return %s, %p : {TYPE}, tensor<i1>
        }}
      {constraint(COLUMNS, "%w#0")}"""
    (loop,) = named(transform(module(body)).module, "stablehlo.while")
    assert "sdy.sharding" not in loop.attributes


@pytest.mark.parametrize("name", ["jax-21562", "cond", "power-while", "uneven"])
def test_a_program_is_handed_over_as_jax_would(name: str) -> None:
    program = BY_NAME[name]
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        lowered = case.jitted().lower(*case.args).compiler_ir("stablehlo")
    result = transform(lowered)
    assert sharding_forms(result.module) <= USUAL | sharding_forms(lowered)


def test_tokens_and_scalars_are_not_constrained() -> None:
    """The random bits are beside a reshard that is taken; the state that comes with them is one element each."""
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))

    def f(x: jax.Array) -> jax.Array:
        largest, place = jax.lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,))
        moved = jax.lax.with_sharding_constraint(jnp.outer(largest, place), NamedSharding(mesh, P(None, ("y", "x"))))
        return moved + largest.sum()

    given = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=NamedSharding(mesh, P("x", "y")))
    module_ = jax.jit(f).lower(given).compiler_ir("stablehlo")
    module_pass.transform_module(module_)
    module_.operation.verify()
    ranks = [ir.RankedTensorType(op.results[0].type).rank for op in named(module_, "sdy.sharding_constraint")]
    assert ranks and min(ranks) > 0
