"""Colours, stripes and scales."""

from reshard.draw import canvas


def test_colours_differ_for_every_number_of_devices():
    for count in (1, 2, 8, 9, 64, 128):
        assert len(set(canvas.colours(count))) == count
