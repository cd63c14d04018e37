"""Sizes and shapes as people write them."""

import pytest

import reshard as rs
from reshard.types.units import parse_bytes, parse_shape


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
