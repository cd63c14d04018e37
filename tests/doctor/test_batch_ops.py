"""Operations on whole rows: which they are, and the layouts in which each device has rows of its own."""

import pytest

from reshard import hlo
from reshard.doctor.batch_ops import batch_op, same_op
from reshard.doctor.chain_reader import Unfit
from reshard.doctor.dataflow.flow import Flow
from tests.doctor.batched import FFT, HEAD, OWN_FFT, OWN_SORT, SORT, proposed

CALL = """HloModule m

ENTRY %main {{
  %p = f32[8,4,4]{{2,1,0}} parameter(0)
  ROOT %c = (f32[8,4,4]{{2,1,0}}, s32[8]{{0}}) custom-call(%p), custom_call_target="{target}", {rest}
}}"""
LAPACK = (
    'api_version=API_VERSION_TYPED_FFI, frontend_attributes={num_batch_dims="1"}, '
    "backend_config={uplo = 76 : ui8, n = -3 : i64}"
)


def op_of(text, name=None):
    module = hlo.parse(text)
    instruction = module.entry.by_name[name] if name else module.entry.root
    return batch_op(module, Flow(module).regions[0], instruction)


def test_a_sort_that_compares_indices_is_stable():
    text = (HEAD + SORT).replace("is_stable=true, ", "")
    assert not op_of(text, "sort").stable
    compared = text.replace("compare(%x, %y), direction=LT", "compare(%i, %j), direction=LT")
    assert op_of(compared, "sort").stable


def test_foreign_code_says_how_many_dims_count_rows():
    op = op_of(CALL.format(target="lapack_spotrf_ffi", rest=LAPACK))
    assert (op.kind, op.target, op.batch) == ("ffi", "lapack_spotrf_ffi", (0,))
    assert op.attributes == (("uplo", 76, "uint8"), ("n", -3, "int64"))
    assert op_of(CALL.format(target="TopK", rest="api_version=x")).kind == "top_k"


@pytest.mark.parametrize(
    "rest",
    [
        LAPACK.replace('num_batch_dims="1"', ""),
        LAPACK.replace("76 : ui8", '"text"'),
        LAPACK.replace("TYPED_FFI", "STATUS_RETURNING"),
        LAPACK + ", custom_call_has_side_effect=true",
        LAPACK + ", output_to_operand_aliasing={{0}: (0, {})}",
    ],
)
def test_other_foreign_code_is_not_known(rest):
    assert op_of(CALL.format(target="other", rest=rest)) is None


def same(one, name, other, other_name):
    old, new = hlo.parse(HEAD + one), hlo.parse(HEAD + other)
    return same_op(old, old.entry.by_name[name], new, new.entry.by_name[other_name])


def test_the_same_operation_on_fewer_rows():
    assert same(FFT, "f", OWN_FFT, "f.1")
    assert same(SORT, "sort", OWN_SORT, "own")
    reordered = OWN_SORT.replace("%less", "%more")
    assert not same(SORT, "sort", reordered, "own")
    assert same(SORT.replace("%less", "%more"), "sort", reordered, "own")


def test_an_fft_whose_operand_is_gathered():
    one = proposed(FFT).replacement()
    assert (one.instruction, one.sources, one.places) == ("f", ("p",), ((2, 8), (8, 1)))
    assert [str(one.choices[0].source), str(one.choices[0].rows)] == ["c64[{d0}2, 8]", "c64[{d0}2, 8]"]
    assert [tuple(map(str, pair)) for pair in one.choices[0].outputs] == [("c64[{d0}2, 8]", "c64[8, {d0}2]")]
    (output,) = one.outputs
    assert (output.number, output.order, output.uses[0].name) == (0, ((4, 4), (2, 2), (2, 1)), "d")


def test_a_sort_whose_second_operand_is_the_index():
    everything = proposed(SORT)
    one = everything.replacement()
    assert one.indices == (None, 1)
    assert [(output.number, output.values[0].name) for output in one.outputs] == [(1, "d")]
    chain = everything.joined[0][0]
    assert sorted(collective.name for collective in chain.collectives) == ["g", "k"]


def test_a_source_in_parts_of_rows_is_moved_to_the_rows_of_the_result():
    columns = FFT.replace("c64[2,8]{1,0} parameter", "c64[8,2]{1,0} parameter").replace(
        "dimensions={0}", "dimensions={1}"
    )
    columns = columns.replace("c64[8,2]{1,0} dynamic-slice(%f, %zero, %at), dynamic_slice_sizes={8,2}",
                              "c64[2,8]{1,0} dynamic-slice(%f, %at, %zero), dynamic_slice_sizes={2,8}")  # fmt: skip
    choices = {str(moves.rows) for moves in proposed(columns).replacement().choices}
    assert choices == {"c64[8, 8]", "c64[{d0}2, 8]"}


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        (
            "dynamic-slice(%f, %zero, %at), dynamic_slice_sizes={8,2}",
            "slice(%f), slice={[0:8], [3:5]}",
            "in part|comes from",
        ),
        ("ROOT %d", "%other = c64[8,8]{1,0} negate(%g)\n  ROOT %d", "takes g as well"),
        ("c64[8,2]{1,0} dynamic-slice", "c64[8,2]{1,0} dynamic-slice", None),
    ],
)
def test_what_is_left(was, is_now, why):
    everything = proposed(FFT.replace(was, is_now))
    if why is None:
        assert everything.replacement().outputs
        return
    with pytest.raises(Unfit, match=why):
        everything.replacement()


def test_what_something_else_takes_in_another_form_is_not_the_operations_own():
    text = FFT.replace(
        "  ROOT", "  %own = c64[2,8]{1,0} slice(%g), slice={[0:2], [0:8]}\n  %n = c64[2,8]{1,0} negate(%own)\n  ROOT"
    )
    assert proposed(text).joined == ()


def test_an_index_of_the_rows_is_not_one_inside_of_them():
    with pytest.raises(Unfit, match="takes 2 arrays"):
        proposed(SORT.replace("iota_dimension=1", "iota_dimension=0")).replacement()
