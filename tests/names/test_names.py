"""Tables of rules: what they read, what they resolve, and that damaged ones end in one error that says what to do."""

from __future__ import annotations

import random
import re
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import ReshardError
from reshard.names import Table, read
from reshard.names.expressions import Expression, Sizes
from reshard.names.patterns import NameTemplate, Options, Wildcard, parse_name, split_numbers

SHIPPED = [file.read_text(encoding="utf-8") for file in (resources.files("reshard.names") / "tables").iterdir()]


def rule(**fields) -> str:
    """The text of a rule whose fields are TOML."""
    return "[[rule]]\n" + "\n".join(f"{name} = {value}" for name, value in fields.items()) + "\n"


def named(text: str, shapes, **sizes):
    return [(each.source, each.target, str(each.view)) for each in read(text).resolve(shapes, **sizes)]


def test_an_index_may_stand_in_brackets_on_either_side():
    text = rule(source='"{l}.{q,k,v}_proj"', target='"{l}.qkv[{0,1,2}]"')
    shapes = {f"7.{name}_proj": (4,) for name in "qkv"}
    wanted = [(f"7.{n}_proj", "7.qkv", f"_0 -> index _0, index={at} of the target's 3") for at, n in enumerate("qkv")]
    assert named(text, shapes) == wanted
    back = read(text).inverse()
    assert [each.target for each in back.resolve({"7.qkv": (3, 4)})] == [*shapes]
    assert back.inverse().target_shapes(shapes) == {"7.qkv": (3, 4)}
    turned = rule(source='"{l}.qkv[{0,1,2}]"', target='"{l}.{q,k,v}_proj"')
    assert read(turned).target_shapes({"7.qkv": (3, 4)}) == shapes


def test_layers_are_stacked_along_any_dim():
    text = rule(source='"{l}.w"', target='"w"', view='"a b -> a l b"')
    shapes = {f"{at}.w": (2, 3) for at in range(5)}
    assert read(text).target_shapes(shapes) == {"w": (2, 5, 3)}
    with pytest.raises(ReshardError, match=re.escape("how many l there are is not known; write sizes = {l = ...}")):
        read(text).inverse().resolve({"w": (2, 5, 3)})
    sized = text + "sizes = { l = 5 }\n"
    assert read(sized).inverse().target_shapes({"w": (2, 5, 3)}) == shapes


def test_each_array_has_as_many_indices_as_sources_have_them():
    text = rule(source='"{l}.{e}.w"', target='"{l}.w[{e}]"')
    shapes = {"0.0.w": (3,), "0.1.w": (3,), "1.0.w": (3,), "1.1.w": (3,), "1.2.w": (3,)}
    assert read(text).target_shapes(shapes) == {"0.w": (2, 3), "1.w": (3, 3)}
    assert read(text).inverse().target_shapes({"0.w": (2, 3), "1.w": (3, 3)}) == shapes
    with pytest.raises(ReshardError, match=re.escape("element (1, 0) of '0.w', of shape (3, 3), is filled by none")):
        read(text).resolve({"0.0.w": (3,), "0.2.w": (3,)})


def test_a_wildcard_is_one_number_wherever_it_stands():
    table = read(rule(source='"{l}.layer.{l}.w"', target='"{l}.w"'))
    assert table.target_shapes({"12.layer.12.w": (3,)}) == {"12.w": (3,)}
    with pytest.raises(ReshardError, match=re.escape("no rule names '1.layer.2.w'")):
        table.resolve({"1.layer.2.w": (3,)})


def test_an_array_has_the_rules_of_the_first_table_that_names_it(tmp_path: Path):
    base = tmp_path / "base.toml"
    base.write_text(rule(source='"{l}.w"', target='"{l}.x"') + rule(source='"{l}.b"', target='"{l}.c"'))
    text = f'extends = "{base}"\n' + rule(source='"{l}.w"', target='"{l}.y"')
    assert [*read(text).target_shapes({"0.w": (2,), "0.b": (2,)})] == ["0.y", "0.c"]
    assert [*read(base).target_shapes({"0.w": (2,)})] == ["0.x"]


def test_a_rule_may_be_for_some_numbers_only():
    some, others = (
        rule(source='"{e}.w"', target=f'"{name}[{{e}}]"', when=f'"{when}"', **fields)
        for name, when, fields in (
            ("few", "e < 2", {"sizes": "{ e = 2 }"}),
            ("many", "1 - (e < 2)", {"view": '"a -> a"', "sizes": "{ e = 5 }", "partly": "true"}),
        )
    )
    shapes = {f"{at}.w": (3,) for at in range(5)}
    table = read(some + others)
    assert table.target_shapes(shapes) == {"few": (2, 3), "many": (5, 3)}
    assert table.inverse().target_shapes({"few": (2, 3), "many": (5, 3)}) == shapes


def test_a_rule_without_a_target_drops_its_arrays():
    text = rule(source='"{l}.inv_freq"') + rule(source='"w"', target='"w"')
    assert read(text).target_shapes({"0.inv_freq": (2,), "w": (3,)}) == {"w": (3,)}


def test_a_part_may_be_all_that_there_is():
    """A vocabulary padded to a multiple of the ranks: what no array fills is the caller's."""
    text = rule(source='"w"', target='"w"', view='"v m -> v m"', sizes='{ v = "padded" }', into='{ v = [0, "vocab"] }')
    sizes = {"vocab": 30, "padded": 32}
    with pytest.raises(ReshardError, match=re.escape("element (30, 0) of 'w', of shape (32, 4), is filled by none")):
        read(text).resolve({"w": (30, 4)}, **sizes)
    table = read(text + "partly = true\n")
    assert table.target_shapes({"w": (30, 4)}, **sizes) == {"w": (32, 4)}
    assert table.inverse().target_shapes({"w": (32, 4)}, **sizes) == {"w": (30, 4)}


def test_moves_name_what_they_read_and_fill():
    mesh = rs.Mesh(x=2)
    text = rule(source='"{k,v}"', target='"kv"', view='"n -> (two n)"', sizes="{ two = { k = 1, v = 1 } }")
    row, both = rs.Layout.parse("f32[{x}2]", mesh), rs.Layout.parse("bf16[{x}4]", mesh)
    moves, sources, targets = read(text).moves({"k": row, "v": row}, {"kv": both})
    assert {name: (sources[name], targets[name]) for name in moves} == {"k": ("k", "kv"), "v": ("v", "kv")}
    assert all(move.cast and move.source is row for move in moves.values())
    back, _, targets = read(text).inverse().moves({"kv": both}, {"k": row, "v": row})
    assert [*back] == ["kv -> k", "kv -> v"] and [*targets.values()] == ["k", "v"]
    copied = rule(source='"w"', target='"t"', view='"n -> (r n)"', sizes="{ r = 2 }", copies='"r"')
    moves, sources, _ = read(copied).moves({"w": row}, {"t": both})
    assert [*moves] == ["w -> t", "w -> t (2)"] and [*sources.values()] == ["w", "w"]
    for layouts, message in (
        ({}, "'kv' is filled, but no target"),
        ({"kv": both, "q": row}, "'q' is a target, but no"),
    ):
        with pytest.raises(ReshardError, match=message):
            read(text).moves({"k": row, "v": row}, layouts)


FUSED = rule(source='"{l}.{q,k}"', target='"{l}.qk"', view='"h -> (two h)"', sizes="{ two = { q = 1, k = 1 } }")

REFUSED_TEXTS = {  # what a table says, and what is said about it
    "\n[[rule": "is not TOML",
    "rule = 3": "rule is 3; head each rule with",
    "rules = 3": "a table has a field 'rules'; did you mean 'rule'?",
    "extends = 3": "table 3: give a file, text in TOML, or one of deepseek-v3-to-megatron",
    'extends = "llama-to-vlm"': "did you mean 'llama-to-vllm'?",
    "[sizes]\ntp = 2.5": "2.5 is not a size",
    "[sizes]\ntp = true": "True is not a size",
    "[[rule]]": "table, rule 1: name None: give text such as",
    rule(source='"a"', targt='"b"'): "table, rule 1: a rule has a field 'targt'; did you mean 'target'?",
    rule(source='"a.{l"', target='"b"'): "its braces do not match",
    rule(source='"a.{l-1}"', target='"b"'): "{l-1} is neither a wildcard nor alternatives",
    rule(source='"a.{p,p}"', target='"b"'): "has an alternative twice",
    rule(source='"a{l}{e}"', target='"b{l}.{e}"'): "a wildcard stands beside a number",
    rule(source='"a[0]"', target='"b"'): "brackets have one {...}",
    rule(source='"a[{p,q}]"', target='"{p,q}"'): "an index is a number",
    rule(source='"a[{0,1}].w"', target='"{p,q}"'): "an index ends the name",
    rule(source='"a.{l}"', target='"b"'): "wildcard {l} is in one name only",
    rule(source='"a"', target='"b.{l}"'): "wildcard {l} is in one name only",
    rule(source='"a.{p,q}"', target='"b.{r,s,t}"'): "write as many on both sides",
    rule(source='"' + "{a,b}" * 13 + '"'): "make more than 4096 names",
    rule(source='"a"', target='"b"', view='"h d"'): "has 0 arrows",
    rule(source='"a"', target='"b"', view="3"): "give text in einops' notation",
    rule(source='"a"', target='"b"', view='"h d -> d h"', sizes="{ q = 2 }"): "sizes names 'q', no atom there",
    rule(source='"a"', target='"b"', view='"h -> h"', into="{ x = 2 }"): "into names 'x', no atom there",
    rule(source='"a"', target='"b"', view='"h -> h"', take="{ h = [1, 2, 3] }"): "give an index, or a start and an end",
    rule(source='"a"', target='"b"', view='"h -> (r h)"', copies='"r"'): "copies is 'r'; name an atom",
    rule(source='"a"', target='"b"', also="1"): "also is 1; give true or false",
    rule(source='"a"', target='"b"', when='"tp ** 2"'): "write it with whole numbers, names",
    rule(source='"a"', target='"b"', when='"tp("'): "size 'tp(' cannot be read",
    rule(
        source='"{q,k}"', target='"b"', view='"h -> (two h)"', sizes="{ two = { q = 1, v = 1 } }"
    ): "the parts of two are",
}


@pytest.mark.parametrize(("text", "message"), REFUSED_TEXTS.items(), ids=REFUSED_TEXTS.values())
def test_a_text_that_is_no_table_is_refused(text, message):
    with pytest.raises(ReshardError) as caught:
        read(text if "\n" in text or "=" in text else f"{text}\n")
    assert message in str(caught.value)


REFUSED_MODELS = {  # shapes that the table of q beside k does not fit, and what is said about them
    "no rule names '0.v'": {"0.q": (4,), "0.k": (4,), "0.v": (4,)},
    "element (4,) of '0.qk', of shape (8,), is filled by none of its 1 parts": {"0.q": (4,)},
    "'0.qk' has shape (8,) by '0.q' (table, rule 1), and (10,) by '0.k'": {"0.q": (4,), "0.k": (5,)},
    "'0.q' of shape 3: give names": {"0.q": 3},
    "3 of shape (4,): give names": {3: (4,)},
    "1 dims are written for an array of shape (4, 2)": {"0.q": (4, 2)},
}


@pytest.mark.parametrize(("message", "shapes"), REFUSED_MODELS.items(), ids=REFUSED_MODELS)
def test_a_model_that_a_table_does_not_fit_is_refused(message, shapes):
    with pytest.raises(ReshardError) as caught:
        read(FUSED).resolve(shapes)
    assert message in str(caught.value)


def test_one_source_needs_leave_to_fill_two():
    twice = rule(source='"w"', target='"a"') + rule(source='"w"', target='"b"')
    message = "element (0,) of 'w' is moved by 'w' (table, rule 1) and by 'w' (table, rule 2); write also = true"
    with pytest.raises(ReshardError, match=re.escape(message)):
        read(twice).resolve({"w": (4,)})
    table = read(twice + "also = true\n")
    assert table.target_shapes({"w": (4,)}) == {"a": (4,), "b": (4,)}
    assert table.inverse().target_shapes({"a": (4,), "b": (4,)}) == {"w": (4,)}


def test_parts_of_a_target_may_not_overlap():
    text = rule(source='"{q,k}"', target='"t"', view='"h -> h"', sizes="{ h = 6 }", into="{ h = [0, 3] }")
    message = "element (0,) of 't' is filled by 'q' (table, rule 1) and by 'k' (table, rule 1); let parts not overlap"
    with pytest.raises(ReshardError, match=re.escape(message)):
        read(text).resolve({"q": (3,), "k": (3,)})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 8}, "size kv_heads of 'max(tp, kv_heads) / kv_heads' is not known"),
        ({"heads": 8, "kv_heads": 3, "tp": 4}, "4 / 3 is no whole number; give sizes that divide"),
        ({"heads": 8, "kv_heads": 0}, "1 / 0 is no whole number"),
        ({"heads": 8, "kv_head": 2}, "llama-to-vllm has no size 'kv_head'; did you mean 'kv_heads'?"),
        ({"heads": -8, "kv_heads": 2}, "heads=-8: a size is a whole number from 0"),
        ({"heads": 8.5, "kv_heads": 2}, "heads=8.5: a size is a whole number from 0"),
        ({"heads": 1 << 62, "kv_heads": 1 << 61}, "is more than 9223372036854775807"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ReshardError) as caught:
        read("llama-to-vllm").resolve({"model.layers.0.self_attn.k_proj.weight": (8, 4)}, **sizes)
    assert message in str(caught.value)


def test_a_size_defined_by_itself_is_refused():
    text = '[sizes]\na = "b"\nb = "a + 1"\n' + rule(source='"w"', target='"w"', view='"h -> h"', sizes='{ h = "a" }')
    with pytest.raises(ReshardError, match="defined by itself"):
        read(text).resolve({"w": (2,)})
    assert read(text).target_shapes({"w": (2,)}, a=2) == {"w": (2,)}


def test_a_size_may_have_any_name():
    text = rule(source='"w"', target='"w"', view='"h -> h"', sizes='{ h = "shapes" }')
    assert read(text).target_shapes({"w": (2,)}, shapes=2) == {"w": (2,)}
    with pytest.raises(ReshardError, match="has no size 'self'; its sizes are shapes"):
        read(text).resolve({"w": (2,)}, self=2)


def test_tables_that_extend_one_another_end(tmp_path: Path):
    one = tmp_path / "one.toml"
    one.write_text(f'extends = "{one}"\n')
    with pytest.raises(ReshardError, match="extend one another without end"):
        read(one)


@pytest.mark.parametrize("given", [None, 3, b"x", "", "no such file", Path("/dev/zero"), Path("/"), ["a"], "\x00"])
def test_what_is_no_table_is_refused(given):
    with pytest.raises(ReshardError, match="table"):
        read(given)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", ".", "w1", "%", "#", "_", Wildcard("l"), Wildcard("e")]), min_size=1, max_size=7),
    st.data(),
)
def test_a_name_that_a_pattern_makes_is_read_back(pieces, data):
    text = "".join(piece if isinstance(piece, str) else f"{{{piece.name}}}" for piece in pieces)
    try:
        template = NameTemplate.build(pieces)
    except ReshardError:
        assert re.search(r"[0-9}]\{|\}[0-9]", text)
        return
    assert parse_name(text).wildcards == template.wildcards
    bound = {name: str(data.draw(st.integers(0, 10**12))) for name in sorted(template.wildcards)}
    name = template.fill(bound)
    assert name == re.sub(r"\{(\w)\}", lambda match: bound[match[1]], text)
    key, numbers = split_numbers(name)
    assert key == template.key and template.bind(numbers) == bound
    other = {name: f"{number}1" for name, number in bound.items()}
    assert not bound or template.bind(split_numbers(template.fill(other))[1]) == other


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b_c", "x", ""]), min_size=2, max_size=4, unique=True), st.booleans())
def test_alternatives_of_both_names_go_together(texts, indexed):
    options = ",".join(texts)
    numbers = ",".join(map(str, range(len(texts))))
    target = f'"t.{{l}}[{{{numbers}}}]"' if indexed else f'"t.{{{options}}}.{{l}}"'
    table = read(rule(source=f'"s.{{{options}}}.{{l}}"', target=target))
    shapes = {f"s.{text}.{layer}": (2,) for text in texts for layer in range(2)}
    wanted = (
        {f"t.{at}": (len(texts), 2) for at in range(2)}
        if indexed
        else {name.replace("s", "t", 1): (2,) for name in shapes}
    )
    assert table.target_shapes(shapes) == wanted
    assert table.inverse().target_shapes(wanted) == shapes
    assert Options(tuple(texts)) in parse_name(f"s.{{{options}}}").options


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.sampled_from(["tp", "h", "3", "0", "12"]),
        lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "<"]), inner, inner),
    )
)
def test_expressions_are_what_python_says(tree):
    def write(node):
        return node if isinstance(node, str) else f"({write(node[1])} {node[0]} {write(node[2])})"

    text = write(tree)
    try:
        wanted = int(eval(text, {"tp": 4, "h": 6}))
    except ZeroDivisionError:
        wanted = None
    try:
        made = Sizes({}, {"tp": 4, "h": 6}).value(Expression.read(text))
    except ReshardError as error:
        assert len(text) > 200 or wanted is None or "more than" in str(error)
    else:
        assert made == wanted


WORDS = re.compile(r"[A-Za-z_]+|\d+|\S")


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_damaged_tables_end_in_one_error(seed):
    """Words of the tables that come along are dropped, doubled, swapped or replaced; the model is one of a Llama."""
    rng = random.Random(seed)
    text = rng.choice(SHIPPED)
    for _ in range(rng.randint(1, 3)):
        words = list(WORDS.finditer(text))
        one, other = rng.sample(words, 2)
        kind = rng.choice(["drop", "double", "swap", "number", "brace"])
        new = {
            "drop": "",
            "double": one[0] * 2,
            "swap": other[0],
            "number": str(rng.choice([0, -1, 7, 1 << 64])),
            "brace": "{,}",
        }
        text = text[: one.start()] + new[kind] + text[one.end() :]
    layer = "model.layers.0."
    shapes = {f"{layer}self_attn.{name}_proj.weight": (rows, 16) for name, rows in (("q", 32), ("k", 8), ("v", 8))}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.experts.{at}.{name}_proj.weight": (24, 16) for name in ("gate", "up") for at in range(2)}
    try:
        table = read(text)
        assert isinstance(table, Table)
        made = table.target_shapes(
            {name: shapes[name] for name in rng.sample([*shapes], rng.randint(0, len(shapes)))}, heads=8, kv_heads=2
        )
        table.inverse().resolve(made, heads=8, kv_heads=2)
    except ReshardError as error:
        assert len(str(error)) > 20
