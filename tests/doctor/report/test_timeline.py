"""The picture of the live bytes over time."""

import re

from reshard.doctor.memory import InstructionMemory
from reshard.doctor.report.page import timeline


def bars(svg):
    return [(css, float(height)) for css, height in re.findall(r'<rect class="(\w+)".*? height="([\d.]+)"', svg)]


def test_bars_are_to_scale_and_moves_are_marked():
    moments = [InstructionMemory("a", 50, False), InstructionMemory("b", 200, True), InstructionMemory("c", 0, False)]
    assert bars(timeline(moments)) == [("live", 25.0), ("moves", 100.0), ("live", 0.0)]


def test_long_programs_share_bars_and_keep_the_peak():
    moments = [InstructionMemory(str(at), 1000 if at == 501 else at % 7, at == 500) for at in range(1000)]
    drawn = bars(timeline(moments))
    assert len(drawn) == 250 and drawn[125] == ("moves", 100.0)
    assert [css for css, _ in drawn].count("moves") == 1


def test_nothing_to_draw():
    assert timeline([]) == "" == timeline([InstructionMemory("a", 0, False)])
