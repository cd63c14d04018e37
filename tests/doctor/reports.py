"""Reports for the tests: a recorded program, one with all kinds of places, and one in which nothing moves."""

from reshard.doctor import examine
from tests.doctor.fragments import DATA, GATHER, OFFSET, REDUCE, SLICE, ZERO, text

TRAIN = (DATA / "train_cpu_0.12.0.1.hlo").read_text()
NOTHING = text("ROOT %r = f32[2,8]{1,0} add(%p, %p)")


def report_of_all_kinds():
    """A gather that is sliced twice in the same way, a gather of the user, a reduction, and a small permute."""
    named = 'metadata={op_name="jit(<lambda>)/shard_map/all_gather" source_file="a<b>.py" source_line=3}'
    again = [line.replace("%g", "%h").replace("%d", "%e") for line in (GATHER, SLICE)]
    lines = [
        *OFFSET, ZERO, GATHER, SLICE, *(line.replace("channel_id=1", "channel_id=9") for line in again),
        f"%u = f32[8,8]{{1,0}} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={{0}}, {named}",
        "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%sum",
        "%one = f32[1,1]{1,0} slice(%p), slice={[0:1], [0:1]}",
        "%m = f32[1,1]{1,0} collective-permute(%one), source_target_pairs={{0,1}}",
        "ROOT %r = f32[8,8]{1,0} custom-call(%d, %e, %u, %s, %m)",
    ]  # fmt: skip
    return examine(text(*lines, before=REDUCE))
