"""Operations on single elements, on real, integer and complex numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax.stablehlo.base import Function, OpCase, emit


def whole(x: jax.Array) -> jax.Array:
    """Integers from 1 to 99."""
    return lax.convert_element_type(x * 98, jnp.int32) + 1


def complex_of(x: jax.Array) -> jax.Array:
    return lax.complex(x, 1 - x * x)


def swapped(x: Any) -> Any:
    """Another operand of the same shape, whose elements come from other devices."""
    return x.T


UNARY: dict[str, Function] = {
    "abs": lambda x: lax.abs(x - 0.5),
    "cbrt": lax.cbrt,
    "ceil": lambda x: lax.ceil(3 * x),
    "cosine": lax.cos,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "floor": lambda x: lax.floor(3 * x),
    "is_finite": lambda x: lax.is_finite(1 / (x - x[0, 0])),
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lambda x: emit(
        "%1 = stablehlo.logistic %0 : tensor<16x16xf32>\nreturn %1 : tensor<16x16xf32>", x, out=[("f4", 16, 16)]
    ),
    "negate": lax.neg,
    "round_nearest_afz": lambda x: lax.round(9 * x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": lambda x: lax.round(9 * x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "sign": lambda x: lax.sign(x - 0.5),
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "tan": lambda x: emit(
        "%1 = stablehlo.tan %0 : tensor<16x16xf32>\nreturn %1 : tensor<16x16xf32>", x, out=[("f4", 16, 16)]
    ),
    "tanh": lax.tanh,
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "convert": lambda x: lax.convert_element_type(x, jnp.bfloat16),
    "bitcast_convert": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "not": lambda x: lax.bitwise_not(whole(x)),
    "popcnt": lambda x: lax.population_count(whole(x)),
    "count_leading_zeros": lambda x: lax.clz(whole(x)),
    "complex": complex_of,
    "real": lambda x: lax.real(complex_of(x)),
    "imag": lambda x: lax.imag(complex_of(x)),
}
BINARY: dict[str, Function] = {
    "add": lambda x: lax.add(x, swapped(x)),
    "atan2": lambda x: lax.atan2(x, swapped(x)),
    "divide": lambda x: lax.div(x, swapped(x)),
    "maximum": lambda x: lax.max(x, swapped(x)),
    "minimum": lambda x: lax.min(x, swapped(x)),
    "multiply": lambda x: lax.mul(x, swapped(x)),
    "power": lambda x: lax.pow(x, swapped(x)),
    "remainder": lambda x: lax.rem(9 * x, swapped(x)),
    "subtract": lambda x: lax.sub(x, swapped(x)),
    "compare": lambda x: lax.lt(x, swapped(x)),
    "select": lambda x: lax.select(x > 0.5, x, swapped(x)),
    "clamp": lambda x: lax.clamp(swapped(x) / 2, x, swapped(x)),
    "and": lambda x: lax.bitwise_and(whole(x), swapped(whole(x))),
    "or": lambda x: lax.bitwise_or(whole(x), swapped(whole(x))),
    "xor": lambda x: lax.bitwise_xor(whole(x), swapped(whole(x))),
    "shift_left": lambda x: lax.shift_left(whole(x), swapped(whole(x)) % 8),
    "shift_right_arithmetic": lambda x: lax.shift_right_arithmetic(-whole(x), swapped(whole(x)) % 8),
    "shift_right_logical": lambda x: lax.shift_right_logical(-whole(x), swapped(whole(x)) % 8),
}
COMPLEX = (
    "abs",
    "add",
    "cosine",
    "divide",
    "exponential",
    "log",
    "multiply",
    "negate",
    "rsqrt",
    "sine",
    "sqrt",
    "subtract",
)
COMPLEX += ("tanh", "is_finite", "power", "log_plus_one", "exponential_minus_one", "sign")


def _on_complex(name: str) -> Function:
    one: dict[str, Any] = {
        "abs": lax.abs, "cosine": lax.cos, "exponential": lax.exp, "log": lax.log, "negate": lax.neg,
        "rsqrt": lax.rsqrt, "sine": lax.sin, "sqrt": lax.sqrt, "tanh": lax.tanh, "log_plus_one": lax.log1p,
        "exponential_minus_one": lax.expm1, "sign": lax.sign,
    }  # fmt: skip
    two: dict[str, Any] = {
        "add": lax.add,
        "divide": lax.div,
        "multiply": lax.mul,
        "power": lax.pow,
        "subtract": lax.sub,
    }
    if name in one:
        return lambda x: one[name](complex_of(x))
    return lambda x: two[name](complex_of(x), swapped(complex_of(x)))


CASES = (
    *(OpCase(name, function) for name, function in (UNARY | BINARY).items()),
    *(OpCase(name, _on_complex(name), "complex") for name in COMPLEX if name != "is_finite"),
    OpCase("constant", lambda x: x + np.arange(256, dtype="f4").reshape(16, 16)),
    OpCase("constant", lambda x: x + 1j * np.arange(256, dtype="c8").reshape(16, 16), "complex"),
)
