"""Serialized modules that are edited: the wire format, fields, ids, and bytes that stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NotationError
from reshard.hlo import wire
from reshard.hlo.proto import ModuleProto, make_parameter, summary_of, without_layout
from reshard.hlo.wire import Field, ProtoMessage
from tests.hlo.splices import NAMES, recorded

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def test_the_format_of_the_specification():
    """The examples of the protocol buffers' own documentation."""
    assert wire.decode_message(b"\x08\x96\x01").number(1) == 150
    assert wire.decode_message(b"\x12\x07testing").text(2) == "testing"
    assert wire.decode_message(b"\x22\x06\x03\x8e\x02\x9e\xa7\x05").numbers(4) == [3, 270, 86942]
    assert wire.decode_message(b"\x09\0\0\0\0\0\0\xf0\x3f\x15\0\0\x80\x3f").fields == [
        Field(1, 1, b"\0\0\0\0\0\0\xf0\x3f"), Field(2, 5, b"\0\0\x80\x3f"),
    ]  # fmt: skip


@given(st.lists(_INT64), st.integers(1, 1000), _INT64)
def test_numbers_are_read_as_they_were_written(values, number, single):
    message = ProtoMessage([])
    message.set_numbers(number, values)
    message.set_number(number + 1, single)
    read = wire.decode_message(wire.encode_message(message))
    assert read.numbers(number) == values
    assert read.number(number + 1) == single


def test_setters_keep_the_place_of_a_field():
    message = wire.decode_message(b"\x08\x01\x12\x01a\x18\x02")
    message.set_data(2, b"bc")
    assert [field.number for field in message.fields] == [1, 2, 3]
    message.set_all_data(2, [b"x", b"y"])
    assert [field.value for field in message.fields] == [1, b"x", b"y", 2]
    message.remove(2)
    assert [field.number for field in message.fields] == [1, 3]
    message.set_numbers(5, [])
    assert [field.number for field in message.fields] == [1, 3]


@pytest.mark.parametrize(
    "data", [b"\x08", b"\x08\xff", b"\x12\x05ab", b"\x0b\x00", b"\x00\x01", b"\x08" + b"\xff" * 11, b"HloModule m\n"]
)
def test_other_bytes_are_refused(data):
    with pytest.raises(NotationError, match="HloModuleProto"):
        wire.decode_message(data)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data):
    try:
        message = wire.decode_message(data)
    except NotationError:
        return
    assert len(wire.encode_message(message)) <= len(data)  # A number may have been written longer than necessary.


def test_edits_are_encoded():
    proto = recorded("train_v5p").decoded()
    entry = proto.entry
    first, *_ = entry.instructions
    first.name = "renamed"
    assert proto.schedule is not None
    proto.schedule[entry.id] = list(reversed(proto.schedule[entry.id]))
    again = ModuleProto.decode(proto.encode())
    assert again.entry.instructions[0].name == "renamed"
    assert again.schedule is not None and again.schedule[entry.id] == proto.schedule[entry.id]


def test_program_shapes_follow_the_parameters():
    module = recorded("train_cpu")
    proto = module.decoded()
    for computation in proto.computations:
        computation.describe_parameters()
    assert proto.encode() == module.module  # They say what XLA had written.


def test_an_instruction_has_all_its_fields():
    one = make_parameter("tile", 2, b"\x10\x0b")
    one.id = 7
    one.control, one.channel, one.metadata = [3, 4], 5, b"\x12\x01m"
    one.called = [9]
    copy = one.copy()
    one.name = "other"
    assert (copy.name, copy.opcode, copy.parameter, copy.shape) == ("tile", "parameter", 2, b"\x10\x0b")
    assert (copy.id, copy.control, copy.channel, copy.metadata, copy.called) == (7, [3, 4], 5, b"\x12\x01m", [9])
    copy.parameter = 0
    assert copy.parameter == 0


def test_ids_of_removed_computations_are_not_given_again():
    """A check that compares with the old module would take the new one for the old."""
    module = recorded("scan_cpu").decoded()
    last = max(module.computations, key=lambda one: one.id)
    assert module.new_ids(0) == []
    module.computations = [one for one in module.computations if one is not last]
    first, second = module.new_ids(2)
    assert last.id < first < second < module.new_ids(1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_computation_that_nobody_opened_keeps_its_bytes(name):
    module = recorded(name)
    proto = module.decoded()
    assert not any(one.is_opened for one in proto.computations) and proto.encode() == module.module
    assert all(ModuleProto.decode(one.fragment).encode() == one.fragment for one in module.splices)
    again = ModuleProto.decode(module.module, like=proto)
    assert all(one in proto for one in again.computations)
    fresh = proto.fresh()
    assert not any(one in proto for one in fresh.computations) and fresh.encode() == module.module
    fresh.entry.instructions[0].name = "changed"
    assert fresh.encode() != module.module and proto.encode() == module.module


@pytest.mark.parametrize("name", NAMES)
def test_layouts_are_chosen_where_the_entry_has_those_that_were_asked_for(name):
    module = recorded(name)
    fragment = ModuleProto.decode(module.splices[0].fragment)
    assert module.decoded().is_laid_out and fragment.is_laid_out
    (parameter,) = fragment.entry.parameters
    parameter.shape = without_layout(parameter.shape)
    assert fragment.is_laid_out == (fragment.schedule is not None)


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
