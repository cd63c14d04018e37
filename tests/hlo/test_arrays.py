"""The large arrays that a module makes."""

import pytest

from reshard import hlo
from tests.hlo import record
from tests.hlo.fragments import computation, module

FUSED = computation("f", "%a = f32[8] parameter(0)", "%b = f32[100] broadcast(%a)", "ROOT %c = f32[8] slice(%b)")
LINES = [
    "%p = f32[40] parameter(0)",
    "%v = u8[160] bitcast(%p)",
    "%g = f32[64] all-gather(%p), replica_groups={{0,1}}",
    "%s = ((f32[64]), f32[8], u32[]) slice-start(%g)",
    "%d = f32[64] copy-done(%g)",
    "%w = (f32[64], s32[]) while(%t), condition=%f, body=%f",
    "%m = (f32[48], bf16[56]) custom-call(%p)",
    "ROOT %x = f32[8] fusion(%p), kind=kLoop, calls=%f",
]


@pytest.fixture
def read():
    return module(*LINES, before=FUSED)


def test_the_largest(read):
    assert hlo.largest(read).instruction.name == "g"
    assert hlo.largest(read).array.elements == 64
    assert hlo.largest(read, fused=True).instruction.name == "b"


def test_arguments_count_among_the_largest():
    assert hlo.largest(module("%p = f32[40] parameter(0)")).instruction.name == "p"
    assert hlo.largest(module("%t = () tuple()")) is None


@pytest.mark.parametrize(("elements", "names"), [(65, []), (64, ["g"]), (56, ["g", "m"]), (8, ["g", "s", "m", "x"])])
def test_the_instructions_that_make_large_arrays(read, elements, names):
    definitions = hlo.large_arrays(read, elements)
    assert [definition.instruction.name for definition in definitions] == names
    assert all(definition.computation.name == "main" for definition in definitions)


def test_the_array_of_a_tuple_is_its_largest(read):
    (_, definition) = hlo.large_arrays(read, 56)
    assert (definition.array.dtype, definition.array.nbytes) == ("bf16", 112)


@pytest.mark.parametrize("name", ["gather_cpu_0.10.2", "gather_v5p_0.12.0.1"])
def test_a_recorded_gather_makes_the_whole_array(name):
    read = hlo.parse((record.DATA / f"{name}.hlo").read_text(encoding="utf-8"))
    assert "all-gather" in [definition.instruction.opcode for definition in hlo.large_arrays(read, 256 * 256)]
    assert hlo.largest(read).array.dims == (256, 256)
