"""A notice has room for all of its lines."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from reshard.draw import canvas
from reshard.draw.notice import Notice
from tests.draw.reading import words


@pytest.mark.parametrize("length", [1, 20, 60])
def test_all_words_are_written_within_the_notices_size(length):
    notice = Notice("tiles", "too many " * length)
    area = canvas.blank(notice.size)
    notice.put(area)
    written = words(area.figure)
    assert written.startswith("no picture of the tiles") and written.count("too many") == length
    renderer = FigureCanvasAgg(area.figure).get_renderer()
    for text in area.figure.texts:
        extent = text.get_window_extent(renderer)
        assert extent.x0 >= 0 and extent.y0 >= 0
        assert extent.x1 <= area.figure.bbox.x1 and extent.y1 <= area.figure.bbox.y1
