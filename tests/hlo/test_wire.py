import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NotationError
from reshard.hlo import wire
from reshard.hlo.wire import Field, ProtoMessage
from tests.hlo.splices import DATA

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.pb")), ids=lambda path: path.stem)
def test_recorded_modules_come_back_byte_for_byte(path):
    data = path.read_bytes()
    message = wire.decode_message(data)
    assert wire.encode_message(message) == data
    for computation in message.all_data(3):
        inner = wire.decode_message(computation)
        assert wire.encode_message(inner) == computation
        assert all(wire.encode_message(wire.decode_message(one)) == one for one in inner.all_data(2))


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


def test_unpacked_numbers_are_read_too():
    assert wire.decode_message(b"\x20\x03\x20\x05\x22\x01\x07").numbers(4) == [3, 5, 7]


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
