"""`Plan.draw`: one picture or all of them on a figure, and what is refused."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import reshard as rs
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, picture, planned
from tests.draw.reading import words
from tests.sampling import sampled


@pytest.mark.fast(2, slow=3)
@pytest.mark.parametrize("name", sampled(list(CASES), *list(CASES)[::2]))
def test_words_are_inside_the_figure_and_do_not_overlap(name):
    figure = picture(name)
    assert isinstance(figure, Figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for axes in figure.axes for text in axes.texts]
    for at, (word, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, word
        for other, second in boxes[at + 1 :]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            tall = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert wide <= 1 or tall <= 2, f"{word!r} and {other!r}"


@pytest.mark.parametrize("what", ["tiles", "memory", "traffic"])
def test_each_picture_alone(what):
    assert [axes.get_label() for axes in planned("three dims").draw(what).axes] == [what]


@pytest.mark.slow
def test_a_figure_shows_itself_once_and_without_pyplot():
    figure = planned("two dims").draw()
    png, size = figure._repr_png_()
    assert png.startswith(b"\x89PNG") and size["width"] > 300
    code = "import sys, tests.draw.cases as c; c.planned('one dim').draw(); print('matplotlib.pyplot' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


@pytest.mark.parametrize("what", ["bytes", "", "Tiles", 3])
def test_an_unknown_picture_is_refused(what):
    with pytest.raises(ReshardError, match="use one of tiles, memory, traffic, or None"):
        planned("one dim").draw(what)


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "reshard.draw.paint_figure"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("reshard.draw.paint_figure")
    with pytest.raises(ReshardError, match=r"pip install matplotlib"):
        planned("one dim").draw("tiles")


def test_a_mesh_too_large_for_one_picture_still_has_the_others():
    mesh = Mesh(x=128, y=64)
    plan = rs.plan(Layout.parse("f32[{x}64, {y}128]", mesh), Layout.parse("f32[8192, {x}{y}1]", mesh))
    written = words(plan.draw())
    assert "no picture of the tiles" in written and "no picture of the traffic" in written and "peak" in written
    with pytest.raises(ReshardError, match="8192 devices"):
        plan.draw("tiles")
    png = io.BytesIO()
    plan.draw("memory").savefig(png, format="png")
    assert png.getvalue()


def test_a_tree_has_its_own_memory_and_the_tiles_of_its_largest_array():
    mesh = Mesh(x=4)
    rows, columns = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)
    tree = rs.plan_tree({"w": (rows, columns), "b": (Layout.parse("f32[{x}2]", mesh), Layout.parse("f32[8]", mesh))})
    drawn = words(tree.draw())
    assert "batch 1" in drawn and f"peak {tree.peak_bytes} B" in drawn.replace(" = floor", "")
    assert str(columns) in drawn and "f32[8]" not in drawn
    with pytest.raises(ReshardError, match="no arrays"):
        rs.plan_tree({}).draw("tiles")
    assert "before" in words(rs.plan_tree({}).draw("memory"))
