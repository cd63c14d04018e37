"""Which collectives and values belong to one chain, where it starts and where it ends."""

from collections import Counter

import pytest

from reshard import hlo
from reshard.doctor.chain_reader import Chain
from reshard.doctor.chain_reader import list_chains as find_chains
from tests.doctor.fragments import GATHER, OFFSET, RECORDED, RESHARD, SLICE, ZERO, Analysis, text

FIRST = "%a = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
SECOND = "%b = f32[8,8]{1,0} all-gather(%c), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}"
USE = "ROOT %r = f32[8,8]{1,0} add(%b, %b)"


def chains(*lines, **options):
    """The names in each chain: collectives, values, results with their used forms, leaves."""
    return [named(chain) for chain in Analysis(text(*lines, **options)).chains()]


def named(chain: Chain):
    results = {value.name: [form.name for form in forms] for value, forms in chain.results.items()}
    names = [one.name for one in chain.collectives]
    return names, [value.name for value in chain.values], results, {leaf.name for leaf in chain.leaves}


def test_a_gather_and_a_slice():
    assert chains(*RESHARD) == [(["g"], ["g", "d"], {"d": ["d"]}, {"p"})]


def test_collectives_with_local_moves_between_them():
    assert chains(FIRST, "%c = f32[4,8]{0,1} copy(%a)", SECOND, USE) == [
        (["a", "b"], ["a", "c", "b"], {"b": ["b"]}, {"p"})
    ]


def test_arithmetic_ends_a_chain():
    assert chains(FIRST, "%c = f32[4,8]{0,1} add(%a, %a)", SECOND, USE) == [
        (["a"], ["a"], {"a": ["a"]}, {"p"}),
        (["b"], ["b"], {"b": ["b"]}, {"c"}),
    ]


def test_a_value_that_is_used_ends_a_chain_and_starts_another():
    use = "ROOT %r = (f32[4,8]{1,0}, f32[8,8]{1,0}) custom-call(%a, %b)"
    assert chains(FIRST, SECOND.replace("%c", "%a"), use) == [
        (["a"], ["a"], {"a": ["a"]}, {"p"}),
        (["b"], ["b"], {"b": ["b"]}, {"a"}),
    ]


def test_the_used_form_of_a_result():
    """The gathered array is used as another shape: it is the result, in this form."""
    use = ["%t = f32[64]{0} bitcast(%g)", "ROOT %r = f32[64]{0} add(%t, %t)"]
    assert chains(GATHER, *use) == [(["g"], ["g"], {"g": ["t"]}, {"p"})]


def test_a_reduction_is_a_chain_of_its_own():
    total = "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}"
    lines = [total, GATHER.replace("%p", "%s"), "ROOT %r = f32[8,8]{1,0} add(%g, %g)"]
    analysis = Analysis(text(*lines))
    first, second = analysis.chains()
    assert first.reduces and not second.reduces
    assert named(first) == (["s"], [], {}, set())
    assert named(second) == (["g"], ["g"], {"g": ["g"]}, {"s"})


def test_collectives_whose_results_are_put_together_are_one_chain():
    lines = [
        "%u = f32[2,8]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{1,0},{2,1}}",
        "%v = f32[2,8]{1,0} collective-permute(%p), channel_id=2, source_target_pairs={{0,1},{1,2}}",
        "%c = f32[4,8]{1,0} concatenate(%u, %v), dimensions={0}",
        "ROOT %r = f32[4,8]{1,0} add(%c, %c)",
    ]
    assert chains(*lines) == [(["u", "v"], ["u", "v", "c"], {"c": ["c"]}, {"p"})]


def test_a_collective_in_a_computation_that_no_region_opens():
    inner = f"%inner {{\n  %p = f32[2,8]{{1,0}} parameter(0)\n  ROOT {GATHER}\n}}\n"
    call = "ROOT %r = f32[8,8]{1,0} custom-call(%p), called_computations={%inner}"
    assert chains(call, before=inner) == [(["g"], [], {}, set())]


def test_collectives_of_two_calls_are_two_chains():
    inner = f"%inner {{\n  %p = f32[2,8]{{1,0}} parameter(0)\n  ROOT {GATHER}\n}}\n"
    lines = [f"%c{at} = f32[8,8]{{1,0}} call(%p), to_apply=%inner" for at in range(2)]
    assert [chain[0] for chain in chains(*lines, "ROOT %r = f32[8,8] add(%c0, %c1)", before=inner)] == [["g"], ["g"]]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_chains_of_recorded_modules(path):
    """Every collective is in one chain; no value is in two; results are values, and leaves are not."""
    analysis = Analysis(path.read_text())
    every = analysis.chains()
    expected = Counter(one.name for one in hlo.collectives(analysis.module, every_branch=True))
    assert Counter(one.name for chain in every for one in chain.collectives) == expected
    values = Counter(value for chain in every for value in chain.values)
    assert max(values.values(), default=1) == 1
    for chain in every:
        assert set(chain.results) <= set(chain.values) and not chain.leaves & set(chain.values)
        assert chain.reduces or not chain.values or chain.results


def test_a_chain_may_begin_with_a_sum():
    lines = [
        *OFFSET, ZERO, "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum",
        "%g = f32[8,8]{1,0} all-gather(%s), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}", SLICE,
        "ROOT %r = f32[8,2]{1,0} add(%d, %d)",
    ]  # fmt: skip
    analysis = Analysis(text(*lines))
    collectives = hlo.collectives(analysis.module)
    (chain,) = find_chains(analysis.flow, analysis.maps, collectives, from_sums=True)
    assert [one.name for one in chain.collectives] == ["s", "g"] and chain.reduces
    assert {value.name for value in chain.leaves} == {"p"}
    assert {value.name: [form.name for form in used] for value, used in chain.results.items()} == {"d": ["d"]}
    assert [len(one.collectives) for one in find_chains(analysis.flow, analysis.maps, collectives)] == [1, 1]


def test_a_sum_of_what_was_moved_needs_it():
    lines = [
        *OFFSET, ZERO, GATHER, SLICE,
        "%s = f32[8,2]{1,0} all-reduce(%d), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%sum",
        "ROOT %r = f32[8,2]{1,0} add(%s, %s)",
    ]  # fmt: skip
    analysis = Analysis(text(*lines))
    one, other = find_chains(analysis.flow, analysis.maps, hlo.collectives(analysis.module), from_sums=True)
    assert [value.name for used in one.results.values() for value in used] == ["d"]
    assert [value.name for value in other.results] == ["s"]
