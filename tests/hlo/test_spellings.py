"""Spellings of HLO that people write and XLA does not print: each is read as XLA's own parser reads it."""

import random

import pytest
from jaxlib import _hlo

from benchmarks.fuzz_faults import mutated_text
from benchmarks.hlo_texts import difference
from reshard import hlo
from reshard.errors import NotationError, ReshardError
from reshard.hlo.text_reader import _read_printed  # pyright: ignore[reportPrivateUsage]
from reshard.jax.xla_pass.fragments import print_module
from tests.doctor.fragments import HLO_DATA

SUM = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }"
TUPLE = "t = (f32[4], (f32[2], s32[])) parameter(0)"
P, Q = "p = f32[8,4] parameter(0)", "q = f32[8,4] parameter(1)"


def entry(*lines, header="HloModule m", before=""):
    """A module whose entry has these lines."""
    return "\n".join([header, before, "ENTRY e {", *lines, "}"])


SPELLINGS = {
    "indented": "\n    " + entry("      " + P, "      ROOT n = f32[8,4] negate(p)").replace("\n", "\n    "),
    "not indented": entry(P, "ROOT n = f32[8,4] negate(p)"),
    "on one line": "HloModule m ENTRY e { p = f32[] parameter(0) ROOT n = f32[] negate(p) }",
    "windows": entry("  " + P, "  ROOT n = f32[8,4] negate(p)").replace("\n", "\r\n"),
    "a wrapped header": entry(
        "  ROOT " + P, header="HloModule m, num_partitions=4,\n  replica_count=2,\n  is_scheduled=true"
    ),
    "a header of blanks": entry("  ROOT " + P, header="  HloModule   %m , num_partitions=2\n\n"),
    "no header": f"ENTRY e {{ ROOT {P} }}",
    "a wrapped instruction": entry(
        "  " + P, "  ROOT g = f32[32,4]", "    all-gather(p),", "      replica_groups={{0,1,", "  2,3}}, dimensions={0}"
    ),
    "blanks in brackets": entry(
        "  " + P,
        "  g = f32[32,4]{1,0} all-gather(p), replica_groups={ {0, 1}, { 2,3 } }, dimensions={ 0 }",
        "  s = f32[16, 4] {1, 0} slice( g ), slice={ [0 : 16], [0:4] }",
        "  ROOT c = f32[16,4] collective-permute(s), source_target_pairs={{0, 1}, {1, 0}}",
    ),
    "blanks around iotas": entry(
        "  " + P, "  ROOT g = f32[16,4] all-gather(p), replica_groups=[2,2] <= [2,2] T(1,0), dimensions={0}"
    ),
    "two instructions on a line": entry("  p = f32[8] parameter(0) %n=f32[8]negate(p)", "  ROOT m = f32[8] negate(n)"),
    "two with attributes": entry("  p = f32[8] parameter(0), sharding={replicated} ROOT n = f32[8] negate(p)"),
    "a brace on the line of the root": entry("  " + P, "  ROOT n = f32[8,4] negate(p) }").removesuffix("\n}"),
    "comments": "// HloModule x {\n"
    + entry("  /* one", "  */ " + P + " // x = f32[] constant(1)", "  ROOT n /*=*/ = f32[8,4] negate(/*index=0*/ p)")
    + "\n// CHECK: }",
    "strings with brackets": entry(
        '  c = f32[] custom-call(), custom_call_target="a } b = f32[] {(\\"",'
        ' metadata={op_name="x = f32[] add(" source_line=3}',
        "  ROOT n = f32[] negate(c)",
    ),
    "a backend configuration on several lines": entry(
        '  c = f32[8] custom-call(), custom_call_target="t", backend_config={"a": {',
        '}, "b": "}"',
        "}",
        "  ROOT n = f32[8] negate(c)",
    ),
    "a dictionary of MLIR": entry(
        "  " + P,
        '  ROOT c = f32[8,4] custom-call(p), custom_call_target="t", backend_config={uplo = 76 : ui8, n = -3 : i64}',
    ),
    "unquoted frontend attributes": entry(
        "  " + P, '  ROOT n = f32[8,4] negate(p), frontend_attributes={a="b, c=d", pairs={{0,1},{1,2}}}'
    ),
    "single quotes": entry(
        "  " + P, "  ROOT g = f32[32,4] all-gather(p), replica_groups=mesh['x'=4, 'y'=2] {'x'}, dimensions={0}"
    ),
    "no entry": f"HloModule m\n{SUM}\nlast {{\n  ROOT p = f32[] parameter(0)\n}}",
    "no root": entry("  " + P, "  n = f32[8,4] negate(p)"),
    "some names with their percent signs": entry("  " + P, "  %" + Q, "  ROOT t = (f32[8,4], f32[8,4]) tuple(p, %q)"),
    "names at colons": "HloModule m: e: {\n  p: = f32[] parameter(0)\n  ROOT n = f32[] negate(p:)\n}",
    "operands with tuple shapes": entry(
        "  " + TUPLE, "  ROOT n = (f32[2], s32[]) get-tuple-element((f32[4], (f32[2], s32[])) t), index=1"
    ),
    "elements": entry("  " + TUPLE, "  ROOT r = f32[2] add(t#1#0, f32[2] %t #1 #0)"),
    "operands that are instructions": entry(
        "  " + P, "  " + Q, "  ROOT r = f32[8,4] add(f32[8,4] maximum(p, q), negate(add(p, q)))"
    ),
    "parameters as operands": entry("  ROOT r = f32[2] add(f32[2] parameter(0), f32[2] constant({1, 2})", "  )"),
    "a computation inside": entry(
        "  " + P,
        "  z = f32[] constant(0)",
        "  ROOT r = f32[8] reduce(p, z), dimensions={1}, to_apply={",
        "    a = f32[] parameter(0)",
        "    b = f32[] parameter(1)",
        "    ROOT s = f32[] add(a, b)",
        "  }",
    ),
    "computations inside": entry(
        "  i = s32[] parameter(0)",
        "  x = f32[] parameter(1)",
        "  ROOT c = f32[] conditional(i, x, x), branch_computations={",
        "    { ROOT a = f32[] parameter(0) },",
        "    { b = f32[] parameter(0) ROOT n = f32[] negate(b) } }",
    ),
    "body before condition": entry(
        "  i = s32[] parameter(0)",
        "  ROOT w = s32[] while(i), body=b, condition=c",
        before="""b { i = s32[] parameter(0) ROOT n = s32[] negate(i) }
            c { i = s32[] parameter(0) ROOT t = pred[] constant(true) }""",
    ),
    "attributes in a text": entry("  " + P, '  ROOT n = f32[8,4] negate(p), metadata={op_name="body=b, calls=%c"}'),
    "no groups": entry("  " + P, "  ROOT r = f32[8,4] all-reduce(p), to_apply=add", before=SUM),
    "a buffer": entry(
        "  " + P,
        '  b = b(f32[8,4]) custom-call(p), custom_call_target="Pin"',
        "  ROOT t = (b(f32[8,4]), f32[8,4]) tuple(b, p)",
    ),
    "sizes with bounds": entry("  ROOT p = f32[<=8, 4] parameter(0)"),
    "memory layouts": entry(
        "  a = s32[6,4]{0,1:T(2,128)(2,1)L(4)#(u32)*(u16)S(5)SC(0:3)(1:1,2)M(8)} parameter(0)",
        "  b = s32[6,4]{1,0:T(*,128)} parameter(1)",
        "  ROOT c = s4[6]{ 0 : E(4) } parameter(2)",
    ),
    "constants": entry(
        "  a = s32[2,2] constant({ {1, -2},",
        "{3, 4} })",
        "  b = u64[] constant(18446744073709551615)",
        "  c = pred[2] constant({true, false})",
        "  d = f32[2] constant({nan, -nan(0x7)})",
        "  ROOT t = (s32[2,2], u64[]) tuple(a, b)",
    ),
    "threads": entry("  ROOT p = f32[] parameter(0)", before=f'{SUM}, execution_thread="host"')
    + ', execution_thread="main"',
    "tables on a line": """HloModule m FileNames 1 "a.py" 2 "b.py" FunctionNames 1 "f" FileLocations
        1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2} StackFrames
        1 {file_location_id=1 parent_frame_id=1} ENTRY e {
            ROOT p = f32[] parameter(0), metadata={op_name="x" stack_frame_id=1} }""",
    "shapes left out": SUM
    + """
        id { x = f32[8] parameter(0) ROOT n = negate(x) }
        two { a = f32[] parameter(0) b = f32[] parameter(1) c = f32[] parameter(2) d = f32[] parameter(3)
            ROOT t = tuple(a, b) }
        lt { a = f32[] parameter(0) b = f32[] parameter(1) c = f32[] parameter(2) d = f32[] parameter(3)
            ROOT l = compare(a, b), direction=LT }
        ENTRY e {
            p = f32[8,4] parameter(0)
            q = f32[8,4] parameter(1)
            z = f32[] constant(0)
            s = add(p, q)
            t = tuple(s, p)
            g = get-tuple-element(t), index=0
            r = transpose(g), dimensions={1,0}
            d = dot(r, q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
            d2 = pad(d, z), padding=1_2_1x0_0
            l = compare(d, d), direction=LT
            c = select(l, d, d)
            v = concatenate(c, c), dimensions={1}
            f = is-finite(v)
            u = reduce(v, z), dimensions={0}, to_apply=add
            k = after-all()
            i = complex(u, u)
            j = imag(i)
            o = call(j), to_apply=id
            m = reduce(v, v, z, z), dimensions={1}, to_apply=two
            n = sort(u, j), dimensions={0}, to_apply=lt
            ROOT all = tuple(d2, f, k, o, m, n)
        }""",
}
"""What each shows, and the text."""


def judge(text):
    """The module that XLA's own parser makes of a text, as XLA prints it."""
    return hlo.parse(print_module(_hlo.hlo_module_from_text(text)))


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_a_text_is_read_as_xla_reads_it(text):
    read = hlo.parse(text)
    assert difference(read, judge(text)) is None
    for held in read.computations.values():
        assert held.root is not None and all(one.shape is not None for one in held.instructions)


def test_the_header_is_read_however_it_is_wrapped():
    wrapped = hlo.parse(SPELLINGS["a wrapped header"])
    assert (wrapped.num_partitions, wrapped.replica_count) == (4, 2)
    assert hlo.parse(SPELLINGS["a header of blanks"]).num_partitions == 2
    quoted = entry("ROOT " + P, header='HloModule m, frontend_attributes={a="num_partitions=9"}')
    assert hlo.parse(quoted).num_partitions is None


@pytest.mark.parametrize("path", sorted(HLO_DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_what_xla_prints_is_read_the_same_in_any_form(path):
    """A blank at the start of each line makes the text one that XLA does not print."""
    text = path.read_text(encoding="utf-8")
    other = "\n".join(" " + line for line in text.splitlines())
    assert _read_printed(text) is not None and _read_printed(other) is None
    assert difference(hlo.parse(other), hlo.parse(text)) is None


@pytest.mark.parametrize(
    ("literal", "shape"),
    [("{...}", "s32[100]"), ("...", "s32[]"), ("{ {...}, {...} }", "s32[2,50]"), ("{1,...}", "s32[3]")],
)
def test_numbers_that_a_text_leaves_out_are_no_numbers(literal, shape):
    """XLA's parser fills them in with whatever it has."""
    one = hlo.parse(entry(f"  ROOT c = {shape} constant({literal})")).entry.root
    assert "..." in one.literal


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "w = convolution(p, q), window={size=1}, dim_labels=bf_io->bf",
            "the shape of a convolution is left out; write it",
        ),
        ("w = f32[?,4] parameter(2)", "not bounded"),
    ],
)
def test_a_shape_that_cannot_be_known_is_refused_when_it_is_asked_for(line, why):
    module = hlo.parse(entry(P, Q, line, "ROOT n = f32[8,4] negate(p)"))
    with pytest.raises(NotationError, match=why):
        _ = module.entry.by_name["w"].shape


def test_damaged_spellings_are_read_or_refused():
    choose = random.Random(26)
    texts = list(SPELLINGS.values())
    for _ in range(1500):
        text = mutated_text(choose, choose.choice(texts))
        try:
            read = hlo.parse(text)
            for held in read.computations.values():
                for one in held.instructions:
                    _ = one.arrays, one.operands, one.attributes, one.called, one.literal
            hlo.collectives(read)
        except ReshardError:
            continue
