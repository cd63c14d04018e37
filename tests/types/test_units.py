"""Sizes, times and shapes as people write and read them."""

import pytest

import reshard as rs
from reshard.types.units import bytes_text, counted, listed, parse_bytes, parse_shape, seconds_text, shape_text


@pytest.mark.parametrize(
    ("text", "size"), [("1KB", 1000), ("1kib", 1024), (".5GiB", 1 << 29), ("2 TB", 2 * 10**12), ("7b", 7), ("1.9", 1)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "B", "-1", "1e6", "0x10", "1 QB", "1,000", "NaN", "1.5.2"])
def test_bad_sizes(text):
    with pytest.raises(rs.errors.ReshardError, match="cannot read the size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16x16", "16,16", "(16, 16)", "[16,16]", "16, 16,"])
def test_shapes(text):
    assert parse_shape(text) == (16, 16)


@pytest.mark.parametrize("text", ["16;16", "-1", "16,,16", "(16", "a", "1.5"])
def test_bad_shapes(text):
    with pytest.raises(rs.errors.ReshardError, match="cannot read the shape"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (10239, "10239 B"),
        (10240, "10.0 KiB"),
        (999 << 10, "999.0 KiB"),
        (1000 << 10, "1.0 MiB"),
        (3 << 60, "3.0 EiB"),
    ],
)
def test_bytes_in_text(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize("size", [0, 1, 4096, 10007, 123_457, 10**6, 7**11, 10**15, 1 << 52])
def test_bytes_in_text_are_read_back_to_a_twentieth(size):
    assert abs(parse_bytes(bytes_text(size)) - size) <= size / 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3e-9, "3 ns"), (9.99e-7, "999 ns"), (9.996e-7, "1 us"), (0.0123456, "12.3 ms"), (1, "1.0 s")],
)
def test_seconds_in_text(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 11)])
def test_shapes_in_text(shape):
    text = shape_text(shape)
    assert text == "a scalar" if not shape else parse_shape(text.replace(" ", "")) == shape


def test_counts_and_lists():
    assert [counted(n, "batch") for n in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert counted(3, "digit") == "3 digits"
    assert [listed(["x", "y", "z"][:n]) for n in range(4)] == ["", "x", "x and y", "x, y and z"]
