"""The moments of a tree: their most is the peak that the tree promises, and they end with what it leaves."""

import pytest

import reshard as rs
from reshard.plans.plan import TreePlan
from reshard.show.plan_table import tree_timeline

MESH, SERVER = rs.Mesh(x=4), rs.Mesh({"y": 2}, device_ids=[3, 4])


def tree(count: int, **options: object) -> TreePlan:
    """Arrays of different sizes: every third one stays, every fourth one goes to other devices."""
    pairs: dict[str, tuple[rs.Layout, rs.Layout]] = {}
    for number in range(1, count + 1):
        rows = rs.Layout.parse(f"f32[{{x}}{4 * number}, 8]", MESH)
        far = rs.Layout.parse(f"f32[{16 * number}, {{y}}4]", SERVER)
        near = rows if number % 3 == 0 else rs.Layout.parse(f"f32[{16 * number}, {{x}}2]", MESH)
        pairs[f"w{number}"] = (rows, far if number % 4 == 0 else near)
    return rs.plan_tree(pairs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_the_most_live_is_the_peak_of_the_tree(count: int, donate: bool):
    planned = tree(count, donate=donate)
    shown = tree_timeline(planned)
    assert max(moment.live_bytes for moment in shown.moments) == shown.peak_bytes == planned.peak_bytes
    assert len(shown.moments) <= 12 and all(size >= 0 for moment in shown.moments for _, size in moment.parts)
    assert shown.floor_bytes <= shown.peak_bytes


def test_a_tree_starts_with_its_sources_and_ends_with_its_targets():
    kept, given = (tree_timeline(tree(2, donate=donate)) for donate in (False, True))
    sources, targets = 4 * 8 * 4 * 3, 16 * 2 * 4 * 3
    assert kept.moments[0].parts == given.moments[0].parts == (("source", sources),)
    assert kept.moments[-1].parts == (("source", sources), ("result", targets))
    assert given.moments[-1].parts == (("source", 0), ("result", targets))


def test_many_batches_share_a_bar():
    few = rs.Layout.parse("f32[{x}4, 8]", MESH)
    batch = tree(1).batches[0]
    many = TreePlan(
        tuple(f"a{at}" for at in range(25)), tuple(type(batch)((f"a{at}",), batch.plans) for at in range(25))
    )
    names = [moment.name for moment in tree_timeline(many).moments]
    assert names[:2] == ["before", "batches 1-3"] and names[-2:] == ["batch 25", "after"]
    assert tree_timeline(many).moments[0].live_bytes == 25 * few.tile_bytes
