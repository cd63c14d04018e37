"""Modules, operands and attributes in every spelling, and text that is not a module."""

import pytest

from reshard import hlo
from reshard.errors import NotationError
from tests.hlo.fragments import computation, module
from tests.hlo.record import DATA

TEXTS = sorted(DATA.glob("*.hlo"))


def instruction(line, **more):
    return module(line, **more).entry.instructions[0]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_line_of_a_module_is_read(path):
    text = path.read_text(encoding="utf-8")
    read = hlo.parse(text)
    lines = [line.split(" = ")[0] for line in text.splitlines() if line.startswith("  ") and " = " in line]
    names = [line.removeprefix("  ").removeprefix("ROOT ").lstrip("%") for line in lines]
    assert [one.name for held in read.computations.values() for one in held.instructions] == names
    assert read.entry.name.startswith("main")
    assert read.devices == read.num_partitions == (4 if "2slices" in path.stem else 8)  # those of one slice
    for held in read.computations.values():
        assert held.root is not None
        for one in held.instructions:
            assert one.shape is not None and set(one.operands) <= set(held.by_name), one
            assert all(name in read.computations for name in one.called)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_names_without_percent_signs_read_the_same(path):
    text = path.read_text(encoding="utf-8")
    bare, read = hlo.parse(text.replace("%", "")), hlo.parse(text)
    for name, held in read.computations.items():
        for one, other in zip(held.instructions, bare.computations[name].instructions, strict=True):
            assert (one.name, one.opcode, one.root, one.shape) == (other.name, other.opcode, other.root, other.shape)
            assert (one.operands, one.called) == (other.operands, other.called)
    assert hlo.traffic(bare) == hlo.traffic(read)


@pytest.mark.parametrize(
    ("call", "operands"),
    [
        ("add(%b, %c.1)", ("b", "c.1")),
        ("add(b, c-2)", ("b", "c-2")),
        ("add(f32[2,3]{1,0:T(8,128)} %b, (f32[2], s32[]) %c)", ("b", "c")),
        ("add(f32[2,3]{1,0} b, f32[] c)", ("b", "c")),
        ("tuple(%a, /*index=5*/%b)", ("a", "b")),
        ("partition-id()", ()),
        ("parameter(0)", ()),
        ("constant({1, 2})", ()),
        ('constant("%a) = (")', ()),
    ],
)
def test_operands(call, operands):
    assert instruction(f'%r = f32[] {call}, metadata={{op_name="x"}}').operands == operands


def test_attributes_are_cut_at_the_outer_commas():
    one = instruction(
        "%r = f32[8]{0} while(%a), condition=%c, body=%b.1, sharding={devices=[2,1]<=[2]}, "
        'metadata={op_name="f(a, b)\\"}"}, backend_config={"a":{"b":[1,2]},"text":"},{"}'
    )
    assert dict(one.attributes) == {
        "condition": "%c",
        "body": "%b.1",
        "sharding": "{devices=[2,1]<=[2]}",
        "metadata": '{op_name="f(a, b)\\"}"}',
        "backend_config": '{"a":{"b":[1,2]},"text":"},{"}',
    }
    assert one.called == ("c", "b.1")
    assert one.sharding == "{devices=[2,1]<=[2]}"


def test_called_computations_of_branches():
    one = instruction("%r = f32[] conditional(%i, %a, %b), branch_computations={%t, %f.2}")
    assert one.called == ("t", "f.2")
    assert instruction("%r = f32[] conditional(%i), true_computation=%t, false_computation=f").called == ("t", "f")


def test_the_header():
    read = module("%a = f32[] constant(1)", header=", is_scheduled=true, replica_count=2, num_partitions=4")
    assert (read.name, read.replica_count, read.num_partitions, read.devices) == ("m", 2, 4, 8)
    assert module("%a = f32[] constant(1)", header="").devices is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        (b"HloModule m", "bytes, not text"),
        ("module @jit_f {\n func.func public @main() }", "this is StableHLO"),
        ("%0 = stablehlo.add %a, %b : tensor<2xf32>", "this is StableHLO"),
        ("\x0a\x05jit_f\x12\x00HloModul", "this is binary"),
        ("{ lambda ; a:f32[2]. let in (a,) }", "no line of it starts with HloModule"),
        ("HloModule a\n\nHloModule b\n", "2 HloModule headers; give one module at a time"),
        ("HloModule a\n\n%f {\n  %x = f32[] constant(1)\n}\n", "ends before its ENTRY computation"),
        ("HloModule a\n\nENTRY %f {\n  %x = f32[] constant(1)\n", "ends inside computation f"),
        ("HloModule a\n\nENTRY %f {\n  %x = f32[] \n}\n", "cannot read the instruction '%x = f32[]'"),
    ],
)
def test_other_text_is_refused_with_advice(text, message):
    with pytest.raises(NotationError, match=r"give|an instruction is") as caught:
        hlo.parse(text)
    assert message in str(caught.value)


def test_a_call_of_a_missing_computation_is_refused():
    with pytest.raises(NotationError, match="calls gone, which the text does not define"):
        hlo.collectives(module("%a = f32[] call(), to_apply=%gone"))


def test_a_computation_that_calls_itself_is_refused():
    line = "%g = f32[8] all-gather(%p), replica_groups={{0,1}}"
    again = computation("again", line, "%a = f32[] call(), to_apply=%again")
    with pytest.raises(NotationError, match="again calls itself"):
        hlo.collectives(module("%a = f32[] call(), to_apply=%again", before=again))


@pytest.mark.slow
def test_large_dumps_and_large_constants():
    """Reads 5 MB in linear time; in quadratic time, this would never end."""
    text = (DATA / "overlap_tpu7x_0.12.0.1.hlo").read_text(encoding="utf-8")
    called, entry = text[text.index("\n%") : text.index("ENTRY")], text[text.index("ENTRY") :]
    lines = [line.replace("ROOT ", "").partition(" = ") for line in entry.splitlines() if " = " in line]
    many = [f"{name}.{k} = {rest}" for name, _, rest in lines for k in range(1000)]
    literal = ", ".join(["1.25"] * 500_000)
    read = module(*many, f"%c = f32[500000]{{0}} constant({{{literal}}}), sharding={{replicated}}", before=called)
    assert sum(len(one.literal) for one in read.entry.instructions) > 5_000_000
    assert hlo.traffic(read).launches == 3000


def test_a_number_that_python_does_not_read_is_refused():
    with pytest.raises(NotationError, match="more than 4300 digits"):
        hlo.parse(
            f"HloModule m, num_partitions={'9' * 5000}\n\nENTRY %e {{\n  ROOT %p = f32[2]{{0}} parameter(0)\n}}\n"
        )
