"""How a module is read, from its text and as XLA prints it: instructions, shapes, stack frames, lines nearby."""

import random
from dataclasses import replace

import pytest
from jaxlib import _hlo

from benchmarks.hlo_texts import difference
from reshard import hlo
from reshard.errors import NotationError, ReshardError
from reshard.hlo import Array, Source, integrity
from reshard.hlo.instruction import read_shape
from reshard.hlo.proto import ModuleProto
from reshard.hlo.text_reader import compiled_platform
from reshard.hlo.wire import Field
from reshard.jax.xla_pass import fragments
from reshard.jax.xla_pass.fragments import read_module
from tests.doctor.fragments import HLO_DATA
from tests.hlo.fragments import GATHER, TABLES, computation, gather_source, metadata, module, only
from tests.hlo.record import DATA
from tests.hlo.splices import NAMES, recorded, spliced_changes

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


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("f32[]", Array("f32", ())),
        ("bf16[8,4]{1,0:T(8,128)(2,1)S(1)}", Array("bf16", (8, 4), "1,0:T(8,128)(2,1)S(1)")),
        ("f32[<=8,2]{1,0}", Array("f32", (8, 2), "1,0")),
        ("()", ()),
        ("(f32[2]{0}, /*index=1*/s32[])", (Array("f32", (2,), "0"), Array("s32", ()))),
        ("((f32[2]{0:T(256)}, ()), u32[]{:S(2)})", ((Array("f32", (2,), "0:T(256)"), ()), Array("u32", (), ":S(2)"))),
    ],
)
def test_a_shape(text, shape):
    assert instruction(f"%a = {text} custom-call()").shape == read_shape(text) == shape


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[3,5]", 60),
        ("f8e4m3fn[7]", 56 // 8),
        ("bf16[7]", 14),
        ("pred[3]", 3),
        ("s4[3]", 2),
        ("u1[9]", 2),
        ("c64[2]", 16),
        ("token[]", 0),
    ],
)
def test_bytes(text, nbytes):
    assert [array.nbytes for array in instruction(f"%a = {text} custom-call()").arrays] == [nbytes]


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
        (
            "HloModule a, entry_computation_layout={()->f32[]}\n\n%f {\n  %x = f32[] constant(1)\n}\n",
            "ends before its ENTRY computation",
        ),
        ("HloModule a\n\nENTRY %f {\n  %x = f32[] constant(1)\n", "inside computation f: the text ends there"),
        ("HloModule a\n\nENTRY %f {\n  %x = f32[] \n}\n", "cannot read the instruction '%x = f32[] }' from '}' on"),
        ("HloModule a\n\nENTRY %f {\n}\n", "inside computation f: the text ends there"),
        (
            "HloModule a\n\nENTRY f {\n  x = f32[] constant(1)\n  x = f32[] constant(2)\n}\n",
            "x is made twice; give the whole module",
        ),
        (
            "HloModule a\n\nENTRY f {\n  x = f32[] constant(1)\n}\n\nwarning: done\n",
            "cannot read the instruction 'warning: done'",
        ),
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


def test_what_nests_without_end_is_read_or_refused():
    deep = "(" * 5000 + "f32[2]" + ")" * 5000
    assert instruction(f"%a = {deep} custom-call()").arrays == (Array("f32", (2,)),)
    chain = [computation(f"c{n}", f"%r{n} = f32[8] call(%p), to_apply=%c{n + 1}") for n in range(2000)] + [
        computation("c2000", f"%g = f32[16] {GATHER}")
    ]
    with pytest.raises(NotationError, match="hundreds of levels deep"):
        hlo.collectives(module("%a = f32[8] call(), to_apply=%c0", before="".join(chain)))


@pytest.mark.slow
def test_large_dumps_and_large_constants():
    """Reads 5 MB in linear time; in quadratic time, this would never end."""
    text = (DATA / "overlap_tpu7x_0.12.0.1.hlo").read_text(encoding="utf-8")
    called, entry = text[text.index("\n%") : text.index("ENTRY")], text[text.index("ENTRY") :]
    lines = [line.replace("ROOT ", "").partition(" = ") for line in entry.splitlines() if " = " in line]
    many = [f"{name}.{k} = {rest}" for name, _, rest in lines for k in range(1000)]
    literal = ", ".join(["1.25"] * 500_000)
    read = module(*many, f"%c = f32[500000]{{0}} constant({{{literal}}}), sharding={{replicated}}", before=called)
    assert sum(len(one.literal) for one in read.entry.instructions) > 2_900_000
    assert hlo.traffic(read).launches == 3000


def test_a_number_that_python_does_not_read_is_refused():
    with pytest.raises(NotationError, match="more than 4300 digits"):
        hlo.parse(
            f"HloModule m, num_partitions={'9' * 5000}\n\nENTRY %e {{\n  ROOT %p = f32[2]{{0}} parameter(0)\n}}\n"
        )


@pytest.mark.parametrize("shape", ["(f32[2]", "[2]{0}", "f32[2] f32[2]", ""])
def test_a_shape_that_cannot_be_read_is_refused(shape):
    with pytest.raises(NotationError, match="give one array"):
        read_shape(shape)
    with pytest.raises(NotationError, match=r"give|an instruction is|write it"):
        _ = instruction(f"%a = {shape} custom-call()").shape


PLATFORMS = {"cpu": "cpu", "v5p": "tpu", "v5p-2slices": "tpu", "v5e": "tpu", "tpu7x": "tpu"}


@pytest.mark.parametrize("path", sorted(HLO_DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_recorded_modules(path):
    assert compiled_platform(path.read_text()) == PLATFORMS[path.stem.split("_")[1]]


@pytest.mark.parametrize(
    ("frame", "file", "line", "function"),
    [
        (1, "train.py", 50, "<module>"),
        (2, 'model \\"x\\".py', 7, "loss"),
        (3, 'model \\"x\\".py', 7, "loss"),
        (4, 'model \\"x\\".py', 7, "loss"),
        (5, "/env/lib/python3.12/site-packages/jax/_src/numpy.py", 1, "inside"),
    ],
)
def test_the_innermost_frame_of_the_user(frame, file, line, function):
    """Frames of jax and of this package are skipped, unless there are no others."""
    assert gather_source(metadata(frame)) == Source("f/mul", file, line, function)


def test_parents_without_the_offset():
    """A table whose first frame has no parent, and whose parents are given by their own ids."""
    tables = TABLES
    for frame, parent in {1: 0, 2: 1, 3: 2, 4: 3}.items():
        tables = tables.replace(f"\n{frame} {{file_location_id={frame} parent_frame_id={frame}}}",
                                f"\n{frame} {{file_location_id={frame} parent_frame_id={parent}}}")  # fmt: skip
    assert gather_source(metadata(4), tables=tables) == gather_source(metadata(4))


def test_a_frame_that_is_its_own_ancestor_ends_the_stack():
    tables = TABLES.replace("3 {file_location_id=3 parent_frame_id=3}", "3 {file_location_id=3 parent_frame_id=5}")
    assert gather_source(metadata(4), tables=tables).line == 1


def test_a_wrapped_collective_has_the_line_of_its_wrapper():
    inner = computation("w", "%p = f32[8] parameter(0)", f"ROOT %g = f32[16] {GATHER}")
    lines = ["%q = f32[8] parameter(0)", f"%s = ((f32[8]), f32[16]) async-start(%q), calls=%w{metadata(2)}"]
    source = only(hlo.collectives(module(*lines, before=inner, tables=TABLES))).source
    assert (source.line, source.exact) == (7, True)


@pytest.mark.parametrize(
    ("own", "more", "expected"),
    [
        ("", [f"%n = f32[16] negate(%g){metadata(2)}"],
         Source("f/mul", 'model \\"x\\".py', 7, "loss", exact=False)),
        (', metadata={op_name="w"}', [f"%n = f32[16] negate(%g){metadata(1)}"],
         Source("w", "train.py", 50, "<module>", exact=False)),
        ("", ["%n = f32[16] negate(%g)", f"%m = f32[16] negate(%n){metadata(1)}"],
         Source("f/mul", "train.py", 50, "<module>", exact=False)),
        ("", ["%t = (f32[16]) tuple(%g)", f"%m = f32[16] custom-call(%t){metadata(1)}"], Source("")),
        (', metadata={op_name="w"}', [], Source("w")),
    ],
)  # fmt: skip
def test_the_nearest_line(own, more, expected):
    assert gather_source(own, *more) == expected


def test_a_line_inside_a_neighbouring_fusion():
    before = computation("f", "%a = f32[16] parameter(0)", f"ROOT %b = f32[16] negate(%a){metadata(1)}")
    assert gather_source("", "%n = f32[16] fusion(%g), kind=kLoop, calls=%f", before=before).line == 50


def test_users_come_before_operands():
    lines = [
        f"%o = f32[8] negate(%q){metadata(1)}",
        f"%g = f32[16] {GATHER.replace('%p', '%o')}",
        f"%n = f32[16] negate(%g){metadata(2)}",
    ]
    assert only(hlo.collectives(module(*lines, tables=TABLES))).source.line == 7


@pytest.mark.parametrize("name", NAMES)
def test_what_xla_prints_of_a_serialized_module_is_its_text(name):
    module = recorded(name)
    text, printed = hlo.parse(module.text), read_module(module.module)
    assert text.name == printed.name and difference(text, printed) is None
    figures = [
        [(c.kind, c.name, c.received_bytes, c.times, c.source, c.operands, c.results) for c in hlo.collectives(one)]
        for one in (text, printed)
    ]
    assert figures[0] == figures[1] != []


@pytest.mark.parametrize("dtype", ["f32", "s32"])
def test_a_long_constant_is_told_apart_by_its_digest(dtype, monkeypatch):
    """What is too long to be printed is another value than any other, and the same as itself."""
    text = """HloModule m

ENTRY e {{
  a = {0}[4] constant({{1, 2, 3, 4}})
  b = {0}[4] constant({{1, 2, 3, 5}})
  c = {0}[4] constant({{1, 2, 3, 4}})
  ROOT t = ({0}[4], {0}[4], {0}[4]) tuple(a, b, c)
}}"""
    data = _hlo.hlo_module_from_text(text.format(dtype)).as_serialized_hlo_module_proto()
    a, b, c, _ = read_module(data).entry.instructions
    assert a.opcode == "constant" and (a.literal == c.literal) and a.literal != b.literal
    monkeypatch.setattr(fragments, "_LONG", 15)
    a, b, c, root = read_module(data).entry.instructions
    assert {one.opcode for one in (a, b, c)} == {"custom-call"} and a.shape == c.shape == root.arrays[0]
    targets = [one.attributes["custom_call_target"] for one in (a, b, c)]
    assert targets[0] == targets[2] != targets[1]


def look_at_all(read):
    """Asks a module for everything that it has."""
    for held in read.computations.values():
        _ = held.root, held.users
        for one in held.instructions:
            _ = one.arrays, one.results, one.operands, one.attributes, one.called, one.literal
            _ = [array.nbytes for array in one.arrays], one.metadata and read.frames.source(one.metadata)
    for one in hlo.collectives(read, every_branch=True):
        _ = one.results and one.dtype, one.pairs, one.groups and one.groups.lists


def damaged(choose, data):
    """Bytes with a few of them changed, left out, put in, or copied from elsewhere."""
    data = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 8))):
        at, other = choose.randrange(len(data)), choose.randrange(len(data))
        some = choose.randbytes(choose.randrange(1, 5))
        end, new = choose.choice(((1, some[:1]), (4 * len(some), b""), (0, some), (8, data[other : other + 8])))
        data[at : at + end] = new
        data = data or bytearray(b"x")
    return bytes(data)


def damaged_field(choose, data):
    """A serialized module in which one field of one instruction is another, is gone, or is of another number."""
    made = ModuleProto.decode(data)
    held = choose.choice(made.computations)
    fields = choose.choice(held.instructions).message.fields
    at = choose.randrange(len(fields))
    number, wire_type, value = fields[at]
    if isinstance(value, int):
        value = choose.choice((0, 1, value + 1, 1 << 40, (1 << 64) - 1))
    else:
        value = damaged(choose, value) if value else choose.randbytes(1)
    number = choose.choice((number, number, 2, 3, 8, 9, 13, 14, 17, 20, 21, 26, 31, 35, 36, 38, 49, 52, 77, 87, 92, 93))
    fields[at : at + 1] = [] if choose.random() < 0.2 else [Field(number, wire_type, value)]
    held.is_changed = True
    return made.encode()


def read_damaged(choose, number):
    """Reads one damaged module, or splices into it, or a damaged fragment into a whole one."""
    module = recorded(choose.choice(NAMES))
    if number == 0:
        text = choose.choice((module.text, choose.choice(TEXTS).read_text(encoding="utf-8")))
        look_at_all(hlo.parse(damaged(choose, text.encode()).decode("utf-8", "replace")))
    elif number == 1:
        check_spliced(damaged_field(choose, module.module), module.splices)
    else:
        change = choose.choice(module.splices)
        fragment = choose.choice((damaged, damaged_field))(choose, change.fragment)
        check_spliced(module.module, [replace(change, fragment=fragment)])


@pytest.mark.parametrize("number", range(3))
def test_damaged_modules_are_read_or_refused(number):
    """Whatever is broken, nothing but an error of this package leaves the readers, the splicer and its check."""
    choose, refused = random.Random(number), 0
    for _ in range(40):
        try:
            read_damaged(choose, number)
        except ReshardError as error:
            assert str(error)
            refused += 1
    assert 1 < refused < 40


def check_spliced(data, splices):
    proto = ModuleProto.decode(data)
    changes = spliced_changes(proto, *splices)
    old = ModuleProto.decode(data)
    integrity.check_splices(old, ModuleProto.decode(proto.encode(), like=old), changes)
