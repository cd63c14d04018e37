"""Instructions: what is read of many at once is what each says, and layouts can be left out of shapes."""

import pytest

from reshard.hlo import wire
from reshard.hlo.proto import summary_of, without_layout
from tests.hlo.splices import NAMES, recorded


@pytest.mark.parametrize("name", NAMES)
def test_the_summary_says_what_the_instructions_say(name):
    for computation in recorded(name).decoded().computations:
        one, instructions = computation.summary, computation.instructions
        assert one == summary_of(instructions) == computation.summary
        assert one.names == tuple(each.name for each in instructions)
        assert one.ids == tuple(each.id for each in instructions)
        assert one.channels == tuple(each.channel for each in instructions if each.channel)
        assert one.called == tuple(number for each in instructions for number in each.called)
        starters = [each for each in instructions if each.opcode in ("while", "conditional", "call")]
        assert one.started == tuple(number for each in starters for number in each.called)


def test_a_shape_without_its_layout():
    shapes = {one.shape for one in recorded("train_v5p").decoded().instructions()}
    assert len({without_layout(shape) for shape in shapes}) < len(shapes)
    assert all(wire.decode_message(without_layout(shape)).data(5) is None for shape in shapes)
