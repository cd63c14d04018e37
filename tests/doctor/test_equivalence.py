"""The check accepts what moves the same elements, rows too, and sees every fault that is planted; proofs hold again."""

import pytest

from reshard import hlo
from reshard.doctor.chain_reader import ChainReader, list_chains
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.equivalence import Proofs, Spliced, Traced, check_equivalent, check_same_rows
from reshard.errors import SpliceError
from tests.doctor import batched
from tests.doctor.batched import FFT, OWN_FFT, OWN_SORT, SORT, proposed

HEAD = """HloModule m, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%body (a: f32[8,8], b: u32[], c: s32[]) -> f32[8,2] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = u32[] parameter(1)
  %c = s32[] parameter(2)
  %d = f32[8,2]{1,0} dynamic-slice(%a, %c, %b), dynamic_slice_sizes={8,2}
  ROOT %r = f32[8,2]{1,0} negate(%d)
}

%fresh (t: f32[8,2]) -> f32[8,2] {
  %t = f32[8,2]{1,0} parameter(0)
  ROOT %r = f32[8,2]{1,0} negate(%t)
}

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
"""
OLD = """  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%i, %two)
  %zero = s32[] constant(0)
  %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %f = f32[8,2]{1,0} fusion(%g, %at, %zero), kind=kLoop, calls=%body
}
"""
NEW = """  %s = f32[2,4,2]{2,1,0} reshape(%p)
  %x = f32[4,2,2]{2,1,0} transpose(%s), dimensions={1,0,2}
  %y = f32[4,2,2]{2,1,0} all-to-all(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %z = f32[8,2]{1,0} reshape(%y)
  ROOT %f = f32[8,2]{1,0} fusion(%z), kind=kLoop, calls=%fresh
}
"""


KNOWN = Proofs()  # What was proved in one test must not let a fault of another pass.


def check(new, old=OLD, shardings=(), head=HEAD, unrolled=()):
    before = Traced(hlo.parse(HEAD + old), 4)
    after = Traced(hlo.parse(head + new), 4, spliced=True, unrolled=unrolled)
    (chain,) = list_chains(before.flow, before.maps, hlo.collectives(before.flow.module), from_sums=True)
    (one,) = ChainReader(before.flow, before.maps, before.numbering, None).replacements(chain)
    check_equivalent(Spliced(before, after, "main", {}, KNOWN), one, Replicas(before.maps, lambda: shardings))


def test_the_same_move_by_other_collectives():
    check(NEW)


LOOP = """%turn (t: (s32[], f32[4,2,2], f32[8,2])) -> (s32[], f32[4,2,2], f32[8,2]) {
  %t = (s32[], f32[4,2,2]{2,1,0}, f32[8,2]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %v = f32[4,2,2]{2,1,0} get-tuple-element(%t), index=1
  %w = f32[8,2]{1,0} get-tuple-element(%t), index=2
  %nil = s32[] constant(0)
  %part = f32[4,2,1]{2,1,0} dynamic-slice(%v, %nil, %nil, %k), dynamic_slice_sizes={4,2,1}
  %moved = f32[4,2,1]{2,1,0} all-to-all(%part), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %column = f32[8,1]{1,0} reshape(%moved)
  %put = f32[8,2]{1,0} dynamic-update-slice(%w, %column, %nil, %k)
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  ROOT %out = (s32[], f32[4,2,2]{2,1,0}, f32[8,2]{1,0}) tuple(%next, %v, %put)
}

%goes_on (c: (s32[], f32[4,2,2], f32[8,2])) -> pred[] {
  %c = (s32[], f32[4,2,2]{2,1,0}, f32[8,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %turns = s32[] constant(2)
  ROOT %less = pred[] compare(%n, %turns), direction=LT
}

ENTRY"""
IN_PARTS = """  %s = f32[2,4,2]{2,1,0} reshape(%p)
  %x = f32[4,2,2]{2,1,0} transpose(%s), dimensions={1,0,2}
  %first = s32[] constant(0)
  %none = f32[] constant(0)
  %empty = f32[8,2]{1,0} broadcast(%none), dimensions={}
  %start = (s32[], f32[4,2,2]{2,1,0}, f32[8,2]{1,0}) tuple(%first, %x, %empty)
  %loop = (s32[], f32[4,2,2]{2,1,0}, f32[8,2]{1,0}) while(%start), condition=%goes_on, body=%turn
  %z = f32[8,2]{1,0} get-tuple-element(%loop), index=2
  ROOT %f = f32[8,2]{1,0} fusion(%z), kind=kLoop, calls=%fresh
}
"""


def test_a_move_in_parts_is_followed_turn_by_turn():
    head = HEAD.replace("ENTRY", LOOP)
    check(IN_PARTS, head=head, unrolled={"turn"})
    with pytest.raises(SpliceError, match="would not come from p"):
        check(IN_PARTS, head=head)  # a loop of the program's own is not entered


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("constant(2)\n  ROOT %less", "constant(1)\n  ROOT %less"),  # a part is missing
        ("constant(0)\n  %none", "constant(1)\n  %none"),  # the first one is
        ("%column, %nil, %k)", "%column, %nil, %nil)"),  # all are written to the same place
        ("%nil, %nil, %k)", "%nil, %nil, %nil)"),  # all are read from the same place
        ("add(%k, %one)", "add(%k, %two)\n  %two = s32[] constant(2)"),
        ("replica_groups=[1,4]<=[4]", "replica_groups={{0,1,3,2}}"),
        ("tuple(%next, %v, %put)", "tuple(%next, %v, %w)"),  # what is written is lost
    ],
)
def test_a_fault_in_a_loop_over_parts_is_seen(was, is_now):
    head, new = HEAD.replace("ENTRY", LOOP).replace(was, is_now), IN_PARTS.replace(was, is_now)
    assert head + new != HEAD.replace("ENTRY", LOOP) + IN_PARTS
    with pytest.raises(SpliceError):
        check(new, head=head, unrolled={"turn"})


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("[1,4]<=[4], dimensions={0}\n  %z", "{{0,1,3,2}}, dimensions={0}\n  %z"),
        ("dimensions={1,0,2}", "dimensions={1,0,2}\n  %x2 = f32[4,2,2]{2,1,0} reverse(%x), dimensions={0}"),
        ("%z = f32[8,2]{1,0} reshape(%y)", "%w = f32[4,2,2]{2,1,0} transpose(%y), dimensions={0,2,1}\n"
         "  %z = f32[8,2]{1,0} reshape(%w)"),
        ("%z = f32[8,2]{1,0} reshape(%y)", "%z = f32[8,2]{1,0} reshape(%x)"),
        ("fusion(%z)", "fusion(%other)"),
        ("[1,4]<=[4], dimensions={0}\n  %z", "{{0,1},{2,3}}, dimensions={0}\n  %z"),
    ],
    ids=["order of a group", "none", "transposed", "not sent", "unknown tile", "groups"],
)  # fmt: skip
def test_planted_faults(was, is_now):
    assert was in NEW
    new = NEW.replace(was, is_now)
    if "%x2" in new:
        new = new.replace("all-to-all(%x)", "all-to-all(%x2)")
    if "%other" in new:
        new = new.replace("  ROOT", "  %q = f32[8,2]{1,0} parameter(1)\n  %other = f32[8,2]{1,0} copy(%q)\n  ROOT")
    with pytest.raises(SpliceError):
        check(new)


def test_a_user_that_gets_nothing_new_is_looked_at():
    """The fusion of the new module still slices, but something else."""
    new = OLD.replace("multiply(%i, %two)", "add(%i, %two)")
    with pytest.raises(SpliceError):
        check(new)


PERMUTED = """  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %row = u32[] divide(%i, %two)
  %column = u32[] remainder(%i, %two)
  %four = u32[] constant(4)
  %at = u32[] multiply(%column, %four)
  %zero = u32[] constant(0)
  %g = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}
  %d = f32[4,4]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={4,4}
  ROOT %n = f32[4,4]{1,0} negate(%d)
}
"""
SWAP = "  %o = f32[2,8]{1,0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}\n"
FROM_OTHER_COLUMN = PERMUTED.replace("  %g =", SWAP + "  %g =").replace("all-gather(%p)", "all-gather(%o)")


def test_a_copy_on_another_device_is_as_good_where_devices_are_known_to_be_equal():
    check(PERMUTED, PERMUTED)
    with pytest.raises(SpliceError, match="would come from"):
        check(FROM_OTHER_COLUMN, PERMUTED)
    check(FROM_OTHER_COLUMN, PERMUTED, ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}",))
    with pytest.raises(SpliceError, match="would come from"):  # The proof holds only where these are equal.
        check(FROM_OTHER_COLUMN, PERMUTED)


NARROW = """  %n = bf16[2,8]{1,0} convert(%p)
  %w = f32[2,8]{1,0} convert(%n)
"""


def test_a_rounding_that_is_lost_or_added_is_seen():
    fresh = NEW.replace("  %s =", NARROW + "  %s =").replace("reshape(%p)", "reshape(%w)")
    rounds = "  %h = bf16[8,8]{1,0} convert(%g)\n  %w = f32[8,8]{1,0} convert(%h)\n"
    before = OLD.replace("  ROOT", rounds + "  ROOT").replace("fusion(%g", "fusion(%w")
    check(fresh, before)
    with pytest.raises(SpliceError, match="f32 would become f32 to bf16 to f32"):
        check(fresh)
    with pytest.raises(SpliceError, match="f32 to bf16 to f32 would become f32"):
        check(NEW, before)


SUM = """  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%i, %two)
  %zero = s32[] constant(0)
  %g = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum
  %d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}
  ROOT %n = f32[2,2]{1,0} negate(%d)
}
"""
SCATTER = """  %z = f32[2,2]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={1}, to_apply=%sum
  ROOT %n = f32[2,2]{1,0} negate(%z)
}
"""


def test_a_reduce_scatter_for_a_sliced_sum():
    check(SCATTER, SUM)


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        ("[1,4]<=[4]", "{{1,0,2,3}}", "other sums"),
        ("[1,4]<=[4]", "{{0,1},{2,3}}", "other sums"),
        ("reduce-scatter(%p)", "reduce-scatter(%negated)", "cannot be followed"),
        ("reduce-scatter(%p)", "reduce-scatter(%reversed)", "other sums"),
        ("to_apply=%sum", "to_apply=%most", "cannot be followed"),
    ],
    ids=["order", "groups", "operand", "place", "operation"],
)
def test_planted_faults_of_sums(was, is_now, why):
    assert was in SCATTER
    others = "  %negated = f32[2,8]{1,0} negate(%p)\n  %reversed = f32[2,8]{1,0} reverse(%p), dimensions={0}\n"
    new = others + SCATTER.replace(was, is_now)
    with pytest.raises(SpliceError, match=why):
        check(new, SUM)


# What was proved holds for equal chains: with other names, channels and lines, and nothing else.


def signature(text, name, leaf="p"):
    traced = Traced(hlo.parse(HEAD + text), 4, spliced=True)
    region = traced.flow.regions[0]
    return traced.signature(HloValue(region, name), (HloValue(region, leaf),))


def inside(text):
    """The signature of the slice inside the fusion."""
    traced = Traced(hlo.parse(HEAD + text), 4)
    region = traced.flow.regions[0]
    scope = traced.flow.inner(region, region.computation.root)
    return traced.signature(HloValue(scope, "d"), (HloValue(region, "p"),))


def test_names_and_channels_are_left_out():
    assert inside(OLD) == inside(OLD.replace("%g", "%h").replace("channel_id=1", "channel_id=3")) is not None
    assert signature(NEW, "z") == signature(NEW.replace("%x", "%w").replace("channel_id=2", "channel_id=5"), "z")


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("constant(2)", "constant(1)"),
        ("[1,4]<=[4]", "{{0,1,3,2}}"),
        ("f32[8,8]{1,0} all-gather", "f32[8,8]{0,1} all-gather"),
        ("multiply(%i, %two)", "add(%i, %two)"),
        ("  %g = f32[8,8]{1,0} all-gather(%p)",
         "  %c = f32[2,8]{1,0} reverse(%p), dimensions={0}\n  %g = f32[8,8]{1,0} all-gather(%c)"),
    ],
    ids=["offset", "groups", "layout", "offset's operation", "further move"],
)  # fmt: skip
def test_everything_else_is_told_apart(was, is_now):
    assert was in OLD
    assert inside(OLD.replace(was, is_now)) not in (None, inside(OLD))


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("all-gather(%p)", "all-gather(%q)"),
        ("all-gather(%p)", "all-gather(%n)"),
        ("multiply(%i, %two)", "multiply(%i, %data)"),
    ],
    ids=["other data", "arithmetic", "offset of data"],
)
def test_what_is_made_of_other_things_has_none(was, is_now):
    more = "  %q = f32[2,8]{1,0} parameter(1)\n  %data = u32[] parameter(2)\n  %n = f32[2,8]{1,0} negate(%p)\n"
    assert inside(more + OLD.replace(was, is_now)) is None


# Operations on own rows.


def check_rows(old, new):
    everything = proposed(old)
    after = Traced(hlo.parse(batched.HEAD + new), 4, spliced=True)
    spliced = Spliced(everything.traced, after, "main", {}, KNOWN)
    check_same_rows(spliced, everything.replacement(), Replicas(everything.traced.maps))


def test_an_operation_on_own_rows():
    check_rows(FFT, OWN_FFT)
    check_rows(SORT, OWN_SORT)
    check_rows(FFT, FFT)


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        ("fft_type=FFT", "fft_type=IFFT", "another operation"),
        ("fft_length={8}", "fft_length={4}", "another operation"),
        ("fft(%p)", "negate(%p)", "another operation"),
        ("dimensions={1,0,2}", "dimensions={1,2,0}", "another place of their rows"),
        (
            "all-to-all(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}",
            "copy(%x)",
            "other elements|another",
        ),
        ("<=[4]", "<=[2,2]T(1,0)", "other elements|another"),
        ("fft(%p)", "fft(%q)", "other elements"),
        ("reshape(%y)", "negate(%r)", "another operation"),
    ],
)
def test_planted_faults_in_an_fft(was, is_now, why):
    new = OWN_FFT.replace("  %f.1", "  %q = c64[2,8]{1,0} reverse(%p), dimensions={1}\n  %f.1")
    new = new.replace("  ROOT", "  %r = c64[8,2]{1,0} reshape(%y)\n  ROOT")
    assert was in new
    with pytest.raises(SpliceError, match=why):
        check_rows(FFT, new.replace(was, is_now))


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        ("iota_dimension=1", "iota_dimension=0", "not be the index"),
        ("%less", "%more", "another operation"),
        ("dimensions={1}", "dimensions={0}", "another operation"),
        ("is_stable=true, ", "", "another operation"),
        ("sort(%p,", "sort(%q,", "other elements"),
    ],
)
def test_planted_faults_in_a_sort(was, is_now, why):
    new = OWN_SORT.replace("  %own", "  %q = f32[2,8]{1,0} reverse(%p), dimensions={0}\n  %own")
    with pytest.raises(SpliceError, match=why):
        check_rows(SORT, new.replace(was, is_now))


def test_the_other_result():
    other = OWN_SORT.replace("ROOT %d = s32[2,8]{1,0} get-tuple-element(%own), index=1",
                             "ROOT %d = f32[2,8]{1,0} get-tuple-element(%own), index=0")  # fmt: skip
    with pytest.raises(SpliceError, match="another one of"):
        check_rows(SORT, other)
