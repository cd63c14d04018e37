"""Operations on rows, made of what their HLO says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reshard.doctor.batch_ops import BatchOp
from reshard.errors import SpliceError
from reshard.hlo import Array
from reshard.jax.xla_pass.fragments import OpFragmentKey, OutputKey, rows_function
from reshard.synth import plan
from reshard.types import Layout, Mesh

LINE = np.arange(12, dtype="float32").reshape(3, 4) % 5


def op(kind, dtype, target="", dims=(9, 4), results=None, **options):
    operand = Array(dtype, dims, "1,0")
    return BatchOp(kind, target, (0,), (operand,), results or (operand,), **options)


def test_an_fft_of_some_rows():
    (result,) = rows_function(op("fft", "c64", "FFT", lengths=(4,)), (None,))(jnp.array(LINE + 0j, "complex64"))
    assert np.allclose(result, np.fft.fft(LINE), atol=1e-4)


def test_top_k_of_some_rows():
    results = (Array("f32", (9, 2)), Array("s32", (9, 2)))
    values, at = rows_function(op("top_k", "f32", "TopK", results=results), (None,))(jnp.array(LINE))
    assert values.tolist() == jax.lax.top_k(LINE, 2)[0].tolist() and at.shape == (3, 2)


def test_a_memory_layout_that_is_not_known():
    bad = op("ffi", "f32", "x")._replace(operands=(Array("f32", (9, 4), "1,0:T(8,128)"),))
    with pytest.raises(SpliceError, match="memory layout"):
        rows_function(bad, (None,))(jnp.array(LINE))


def test_the_key_says_what_runs_where():
    mesh = Mesh(x=2)
    rows, columns = (Layout.parse(text, mesh) for text in ("c64[{x}2, 4]", "c64[4, {x}2]"))
    after = Array("c64", (4, 2), "1,0")
    output = OutputKey(0, plan(rows, columns), ((4, 2), (2, 1)), after)
    key = OpFragmentKey(
        op("fft", "c64", "FFT", (4, 4), lengths=(4,)), (None,), plan(rows, rows), Array("c64", (2, 4), "1,0"),
        ((2, 4), (4, 1)), (output,),
    )  # fmt: skip
    assert str(key) == "FFT on c64[{x}2, 4]" and key.mesh == mesh and key.afters == (after,)
