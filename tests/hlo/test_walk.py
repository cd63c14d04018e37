"""Collectives of recorded and compiled modules, in loops and branches.

The bytes that each must receive are computed here, from the shapes of the recorded programs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reshard import hlo
from reshard.errors import NotationError
from reshard.hlo import Array, Total
from tests.hlo import record
from tests.hlo.fragments import GROUPS, PARAMETERS, computation, module, only

TILE = 64 * 256  # of 256 x 256 elements in 4 pieces
SMALL = 64 * 128  # in 4 x 2
LAYER = 4096 * 2048  # of 4096 x 4096, gathered over 4 from a quarter
COUNTED = {
    "gather": [("all_gather", 3 * TILE, 1)],
    "swap": [("permute", TILE // 2, 1)],
    "scatter": [("reduce_scatter", 256 * 1024 // 2, 1)],
    "kinds": [
        ("all_gather", 3 * SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_to_all", SMALL * 7 // 8, 1),
        ("permute", 0, 1),
        ("permute", SMALL, 1),
        ("reduce_scatter", SMALL * 3 // 4, 1),
    ],
    "ring": [("permute", TILE, 15)],
    "branch": [("all_reduce", TILE * 3 // 2, 1), ("permute", TILE, 1)],
    "endless": [("all_reduce", 1.5, 1), ("all_reduce", TILE, None)],
    "overlap": [("all_gather", LAYER * 3 // 4, 1), ("all_gather", LAYER * 3 // 4, 1), ("all_reduce", LAYER // 2, 1)],
}
"""The collectives of each program: kind, elements received, how often it runs."""

INSTEAD = {
    # XLA:CPU does not create reduce-scatters; on TPU, XLA turns a small one into an all-reduce.
    "scatter_cpu": [("all_reduce", 256 * 1024, 1)],
    "kinds_v5p": [("all_reduce", SMALL * 3 // 2, 1) if c[0] == "reduce_scatter" else c for c in COUNTED["kinds"]],
    # Two slices, with the axis x across them: first the slices exchange, then the 2 x 2 chips of each.
    "gather_v5p-2slices": [("all_gather", TILE, 1), ("all_gather", 2 * TILE, 1)],
    "kinds_v5p-2slices": [
        ("all_gather", SMALL, 1),
        ("all_gather", 2 * SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_to_all", SMALL * 7 // 8, 1),
        ("permute", 0, 1),
        ("permute", SMALL, 1),
        ("reduce_scatter", SMALL // 4, 1),
    ],
}


def counted(program, platform, nbytes):
    expected = INSTEAD.get(f"{program}_{platform}", COUNTED[program])
    return sorted(((kind, elements * nbytes, times) for kind, elements, times in expected), key=str)


def measured(text):
    return sorted(((c.kind, c.received_bytes, c.times) for c in hlo.collectives(hlo.parse(text))), key=str)


@pytest.mark.parametrize("path", sorted(record.DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_recorded_modules(path):
    program, platform, _ = path.stem.split("_")
    nbytes = 4 if platform in ("cpu", "v5p-2slices") else 2
    assert measured(path.read_text(encoding="utf-8")) == counted(program, platform, nbytes)


@pytest.fixture(scope="module")
def compiled():
    """The HLO of all programs, compiled for CPU by the installed jax."""
    run = subprocess.run(
        [sys.executable, record.__file__, "cpu"], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.fast(3)
@pytest.mark.parametrize("program", record.PROGRAMS)
def test_freshly_compiled_modules(compiled, program):
    assert measured(compiled[program]) == counted(program, "cpu", 4)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("all_gather", "lax.all_gather("),
        ("all_to_all", "lax.all_to_all("),
        ("reduce_scatter", "lax.psum_scatter("),
        ("all_reduce", "lax.pmax("),
    ],
)
def test_the_users_line(compiled, kind, call):
    one = only(c for c in hlo.collectives(hlo.parse(compiled["kinds"])) if c.kind == kind)
    lines = Path(record.__file__).read_text(encoding="utf-8").splitlines()
    assert one.source.exact and one.source.file == "record.py" and one.source.function == "kinds.<locals>.body"
    assert call in lines[one.source.line - 1]


def test_groups_and_arrays_of_a_compiled_module(compiled):
    one = only(hlo.collectives(hlo.parse(compiled["gather"])))
    assert one.groups.lists == ((0, 2, 4, 6), (1, 3, 5, 7)) and one.group_size == 4
    assert [array.dims for array in (*one.operands, *one.results)] == [(64, 256), (256, 256)]
    assert (one.dtype, one.opcode, one.pairs) == ("f32", "all-gather", ())
    ring = only(hlo.collectives(hlo.parse(compiled["ring"])))
    assert sorted(ring.pairs) == [(2 * i + j, (2 * i + 2) % 8 + j) for i in range(4) for j in range(2)]


# ---- calls


@pytest.mark.parametrize(
    "lines",
    [
        ["%s = ((f32[8]), f32[8], s32[]) async-start(%p), calls=%w", "ROOT %r = f32[8] async-done(%s), calls=%w"],
        ["%s = ((), ()) call-start(), to_apply=%w", "%u = (f32[8]) call-update(%s, %p)", "%r = f32[8] call-done(%u)"],
        ["ROOT %r = f32[8] call(%p), to_apply=%w"],
        ["ROOT %r = f32[8] fusion(%p), kind=kCustom, calls=%w"],
        ['ROOT %r = f32[8] custom-call(%p), custom_call_target="x", called_computations={%w}'],
        ["%s = (f32[8]) async-start(%p), calls=%w.outer", "ROOT %r = f32[8] async-done(%s)"],
    ],
)
def test_a_wrapped_collective_counts_once(lines):
    inner = ["%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}, dimensions={{0}}"]
    before = computation("w", *inner)
    before += computation("w.outer", "%o = f32[8] parameter(0)", "ROOT %c = f32[8] call(%o), to_apply=%w")
    one = only(hlo.collectives(module(*PARAMETERS, *lines, before=before)))
    assert (one.kind, one.computation, one.received_bytes) == ("all_to_all", "w", 24)


def test_a_computation_that_is_called_twice_counts_twice():
    before = computation("w", "%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}")
    read = module(*PARAMETERS, "%r = f32[8] call(%p), to_apply=%w", "%s = f32[8] call(%r), to_apply=%w", before=before)
    assert hlo.traffic(read) == hlo.Traffic(2, 48, {"all_to_all": Total(2, 48)}, True)


# ---- loops and branches

REDUCE = f"all-reduce(%v), {GROUPS}, use_global_device_ids=true"


def loop(name, body, condition="cond", count=None):
    config = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count is not None else ""
    return f"%{name} = f32[8] while(%v), condition=%{condition}, body=%{body}{config}"


def bodies(*more):
    v = "%v = f32[8] parameter(0)"
    return "".join(
        [
            computation("cond", v, "ROOT %less = pred[] custom-call(%v)"),
            computation("reduces", v, f"%sum = f32[8] {REDUCE}", "ROOT %less = pred[] custom-call(%sum)"),
            computation("inner", v, f"ROOT %sum = f32[8] {REDUCE}"),
            computation("outer", v, "ROOT " + loop("nested", "inner", count=4)),
            computation("unknown", v, "ROOT " + loop("nested", "inner")),
            *more,
        ]
    )


@pytest.mark.parametrize(
    ("line", "times"),
    [
        (loop("w", "inner", count=5), [5]),
        (loop("w", "outer", count=3), [12]),
        (loop("w", "inner", count=0), [0]),
        (loop("w", "inner"), [None]),
        (loop("w", "unknown", count=3), [None]),
        (loop("w", "outer"), [None]),
        (loop("w", "inner", "reduces", count=5), [6, 5]),
    ],
)
def test_loops_multiply(line, times):
    read = module("%v = f32[8] parameter(0)", line, before=bodies())
    assert [one.times for one in hlo.collectives(read)] == times
    total = hlo.traffic(read)
    assert total.launches == sum(1 if count is None else count for count in times)
    assert total.received_bytes == 48 * total.launches
    assert total.exact == (None not in times)


@pytest.mark.parametrize(
    "branches", ["branch_computations={%inner, %outer, %cond}", "true_computation=%inner, false_computation=%outer"]
)
def test_the_worst_branch_counts(branches):
    read = module("%v = f32[8] parameter(0)", f"ROOT %c = f32[8] conditional(%i, %v, %v), {branches}", before=bodies())
    assert [one.times for one in hlo.collectives(read)] == [4]
    assert [one.times for one in hlo.collectives(read, every_branch=True)] == [1, 4]


def test_between_branches_that_receive_the_same_more_launches_count():
    v, line = "%v = f32[8] parameter(0)", "collective-permute(%v), source_target_pairs={{0,0}}"
    two = computation("two", v, f"%a = f32[8] {line}", f"ROOT %b = f32[8] {line}")
    one = computation("one", v, f"ROOT %c = f32[8] {line}")
    branches = "ROOT %c = f32[8] conditional(%i, %v, %v), branch_computations={%one, %two}"
    assert [each.name for each in hlo.collectives(module(v, branches, before=one + two))] == ["a", "b"]


def test_collectives_are_listed_in_program_order():
    lines = [f"%a = f32[8] {REDUCE}", loop("w", "inner", count=2), f"%z = f32[8] {REDUCE}"]
    read = module("%v = f32[8] parameter(0)", *lines, before=bodies())
    assert [one.name for one in hlo.collectives(read)] == ["a", "sum", "z"]


# ---- refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%r = f32[8] all-gather(%p), dimensions={0}", "all-gather r has no replica_groups"),
        ("%r = f32[8] all-gather(%p), replica_groups={{0,1}", "over each device once"),
    ],
)
def test_what_cannot_be_counted_is_refused(line, message):
    with pytest.raises(NotationError, match=message):
        hlo.collectives(module(line))


def test_groups_of_all_devices_need_their_number_in_the_header():
    with pytest.raises(NotationError, match="keep num_partitions=8"):
        hlo.collectives(module("%r = f32[8] all-gather(%p), replica_groups={}", header=""))


def test_traffic_of_some_collectives():
    collectives = hlo.collectives(hlo.parse((record.DATA / "kinds_cpu_0.12.0.1.hlo").read_text(encoding="utf-8")))
    total = hlo.traffic(one for one in collectives if one.kind == "permute")
    assert total == hlo.Traffic(2, SMALL * 4, {"permute": Total(2, SMALL * 4)}, True)


def test_operands_that_the_computation_does_not_define():
    one = only(hlo.collectives(module(f"%r = f32[32] all-gather(%gone), {GROUPS}")))
    assert one.operands == () and one.results == (Array("f32", (32,)),)


@pytest.mark.parametrize(
    ("attributes", "lists"),
    [
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", ((0, 1, 2, 3, 4, 5),)),
        ("channel_id=1, replica_groups={{0},{1}}", ((0, 1, 2), (3, 4, 5))),
        ("channel_id=1, replica_groups={{1,0}}", ((3, 4, 5, 0, 1, 2),)),
        ("replica_groups={}", ((0, 1),)),
        ("channel_id=1, replica_groups={{0,5},{1,4},{2,3}}", ((0, 5), (1, 4), (2, 3))),
    ],
)
def test_replicas_and_partitions(attributes, lists):
    """2 replicas of 3 partitions: without global ids, groups are of replicas if their ids allow it."""
    line = f"ROOT %r = f32[6] all-reduce(%p), {attributes}"
    read = module(line, header=", replica_count=2, num_partitions=3")
    assert only(hlo.collectives(read)).groups.lists == lists
