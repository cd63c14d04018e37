"""The figures show the numbers that the plan, its layouts' meaning and the reference runtime have."""

import io
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import matplotlib
import matplotlib.style
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import reshard as rs
from reshard.draw import canvas
from reshard.draw.live import moments, parts
from reshard.errors import ReshardError
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from reshard.types.plan import Plan, StepSpec, chain
from tests.draw.cases import CASES, M222, picture, planned


def layouts(plan: Plan) -> list[Layout]:
    return [plan.source, *(step.result for step in plan.steps)]


def labelled(figure, label):
    """The axes of a figure that have a label."""
    (found,) = [axes for axes in figure.axes if axes.get_label() == label]
    return found


def panel_names(plan: Plan) -> list[str]:
    count = len(plan.steps)
    return ["source", *(f"after step {n}" for n in range(1, count)), "target"] if count else ["source and target"]


def words(figure) -> str:
    """All that is written in a figure."""
    every = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    titles = [axes.xaxis.label.get_text() for axes in figure.axes]
    ticks = [tick.get_text() for axes in figure.axes for tick in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return "\n".join([*(text.get_text() for text in every), *titles, *ticks])


# ---- tiles -----------------------------------------------------------------------------------------


def colour_of(plan: Plan) -> dict[int, str]:
    ids = sorted(plan.source.mesh.devices)
    return dict(zip(ids, canvas.colours(len(ids)), strict=True))


class Seen:
    """A panel of tiles as a person reads it: names and ticks say where an element is, fills and labels whose it is."""

    NAME = re.compile(r"dim (\d+) \((\d+)\)")
    SLICE = re.compile(r"dim (\d+): (\d+):(\d+)")

    def __init__(self, axes):
        texts = [(text.get_text(), text.get_position()) for text in axes.texts]
        names = [axes.xaxis.label.get_text(), *(word for word, _ in texts)]
        self.across = next((int(found[1]) for word in names if (found := self.NAME.fullmatch(word))), None)
        found = self.NAME.fullmatch(axes.yaxis.label.get_text())
        self.down = int(found[1]) if found else None
        ((self.left, self.wide),) = self.scales(axes.xaxis) or [(0, axes.get_xlim()[1])]
        rows = self.scales(axes.yaxis) or [(0, axes.get_ylim()[0])]
        slices = [self.SLICE.findall(word) for word, _ in texts if word.startswith("dim") and ": " in word]
        spans = [{int(dim): (int(start), int(stop)) for dim, start, stop in each} for each in slices] or [{}]
        self.slices = list(zip(rows, spans, strict=True))
        self.labels = [(word, at) for word, at in texts if re.fullmatch(r"[\d,. +-]+", word)]
        self.hatched = [path for each in axes.collections if each.get_hatch() for path in each.get_paths()]
        filled = [each for each in axes.collections if each.get_alpha() is None and each.get_facecolors()[:, 3].any()]
        shown = [zip(each.get_paths(), each.get_facecolors(), strict=True) for each in filled]
        self.fills = [(path, to_hex(face)) for each in shown for path, face in each]

    @staticmethod
    def scales(axis):
        """(inches of 0, inches of one element) for each run of ticks that begins with 0."""
        ticks = list(zip(axis.get_ticklocs(), (int(tick.get_text()) for tick in axis.get_ticklabels()), strict=True))
        if not ticks:
            return []
        starts = [at for at, (_, border) in enumerate(ticks) if border == 0]
        ends = [*(at - 1 for at in starts[1:]), len(ticks) - 1]
        return [(ticks[a][0], (ticks[b][0] - ticks[a][0]) / ticks[b][1]) for a, b in zip(starts, ends, strict=True)]

    def place(self, element, within=(0.5, 0.5)):
        """Where a part of an element is drawn, if it is."""
        for (top, tall), spans in self.slices:
            if all(start <= element[dim] < stop for dim, (start, stop) in spans.items()):
                x = 0 if self.across is None else element[self.across]
                y = 0 if self.down is None else element[self.down]
                return self.left + self.wide * (x + within[0]), top + tall * (y + within[1])
        return None

    def under(self, place, rank):
        """The element at a place: of a dim that is not drawn, the first one."""
        x, y = place
        (top, tall), spans = [each for each in self.slices if each[0][0] <= y][-1]
        known = {dim: start for dim, (start, _) in spans.items()}
        known |= {self.across: int((x - self.left) / self.wide), self.down: int((y - top) / tall)}
        return tuple(known.get(dim, 0) for dim in range(rank))

    def drawn(self, layout):
        """The elements that are to be seen: dims that are not drawn count at index 0."""
        sliced = {dim for _, spans in self.slices for dim in spans}
        dims = {self.across, self.down, *sliced}
        return product(*(range(n if dim in dims else min(n, 1)) for dim, n in enumerate(layout.shape)))


def holders(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    """The devices of every element, padding included, by its meaning."""
    held: dict[tuple[int, ...], set[int]] = {}
    for device in layout.mesh.devices:
        for element in product(*meaning(layout, device)):
            held.setdefault(element, set()).add(device)
    return held


def listed(label: str) -> set[int]:
    """The devices that a label names."""
    found: set[int] = set()
    for part in label.split(" + "):
        if match := re.fullmatch(r"(\d+),(\d+),\.\.,(\d+)", part):
            first, second, last = map(int, match.groups())
            found |= set(range(first, last + 1, second - first))
            continue
        for run in part.split(","):
            first, _, last = run.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def panels(plan: Plan, figure=None):
    """Each panel of the picture of the tiles, with its layout."""
    figure = figure or plan.draw("tiles")
    return [(Seen(labelled(figure, name)), at) for name, at in zip(panel_names(plan), layouts(plan), strict=True)]


FULL = [name for name in CASES if name != "empty"]
STEPS = [(n + 0.5) / 16 for n in range(16)]
PARTS = [*((0.5, step) for step in STEPS), *((step, 0.5) for step in STEPS)]
"""Where in an element its colour is looked up."""


@pytest.mark.parametrize("name", FULL)
def test_every_element_has_the_colours_of_its_devices(name):
    plan = planned(name)
    colour = colour_of(plan)
    for seen, layout in panels(plan, picture(name)):
        held = holders(layout)
        some = PARTS if len(held) < 4096 else PARTS[7:10]
        every = [(element, part) for element in seen.drawn(layout) for part in some]
        places = [seen.place(element, part) for element, part in every]
        assert places and None not in places, f"an element of {layout} is nowhere"
        points, colours = np.array(places), dict[frozenset, set]()
        for path, fill in seen.fills:
            for at in np.flatnonzero(path.contains_points(points)):
                colours.setdefault(frozenset(held[every[at][0]]), set()).add(fill)
        assert set(colours) == {frozenset(held[element]) for element, _ in every}
        for devices, found in colours.items():
            pale = len(devices) > 8
            assert found == ({canvas.PALE} if pale else {colour[d] for d in devices}), f"{devices}: {layout}"


@pytest.mark.parametrize("name", FULL)
def test_labels_name_the_devices_that_hold_what_is_under_them(name):
    plan = planned(name)
    for seen, layout in panels(plan, picture(name)):
        held, named = holders(layout), set()
        for label, place in seen.labels:
            element = seen.under(place, len(layout.shape))
            assert listed(label) == held[element], f"{label} at {element} of {layout}"
            named |= listed(label)
        fit = layout.mesh.size < 64 or layout.tile_shape != (64, 1)
        assert named == (set(layout.mesh.devices) if fit else set()), f"{layout} is labelled {seen.labels}"


def test_summands_are_joined_by_a_plus_and_replicas_by_a_comma():
    (seen, _), *_ = panels(rs.plan(Layout.parse("f32[{z}4] + sum{x}", M222), Layout.parse("f32[8]", M222)))
    assert [label for label, _ in seen.labels] == ["0,2 + 4,6", "1,3 + 5,7"]


def test_padding_is_hatched_and_nothing_else():
    for name in FULL:
        plan = planned(name)
        for seen, layout in panels(plan, picture(name)):
            points = [seen.place(element) for element in seen.drawn(layout)]
            assert not any(path.contains_points(points).any() for path in seen.hatched), name
            along = [layout.dims[dim] for dim in (seen.across, seen.down) if dim is not None]
            past = [start >= layout.shape[dim] for _, spans in seen.slices for dim, (start, _) in spans.items()]
            assert bool(seen.hatched) == (any(past) or any(dim.padded > dim.size for dim in along)), name


def test_an_empty_array_says_so():
    assert words(picture("empty")).count("no elements") == 1 + len(planned("empty").steps)


def test_steps_and_bytes_stand_between_the_panels():
    for name in CASES:
        plan = planned(name)
        written = words(picture(name))
        for step in plan.steps:
            assert step.kind in written and canvas.bytes_text(step.received_bytes) in written
        for layout in layouts(plan):
            assert str(layout) in written.replace("\n", " ")


LARGE = [
    ("f64[64{x}64, 64{y}64]", "the first 16 of 128 runs of dim 0 and 16 of 128 runs of dim 1"),
    ("f64[{x}4096, 4096{y}64]", "the first 16 of 8192 runs of dim 1"),
    ("f64[{x}64{y}64]", ""),
    ("f64[{x}2048{y}64]", "the first 1024 of 8192 runs of dim 0"),
    ("f64[{x:(1)2}64{x:(2)2}2, {y:(1)2}64{y:(2)2}2]", "the first 64 of 256 runs of dim 0 and 64 of 256 runs of dim 1"),
]


@pytest.mark.parametrize(("source", "note"), LARGE)
def test_large_arrays_are_drawn_in_part_and_say_so(source, note):
    mesh = Mesh(x=4, y=4) if "(" in source else Mesh(x=2, y=2)
    layout = Layout.parse(source, mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float64", [["x", "y"]]))
    figure = plan.draw("tiles")
    written = words(figure).replace("\n", " ")
    assert f"Source: {note}" in written if note else "the first" not in written
    (seen, _), *_ = panels(plan, figure)
    assert len(seen.fills) <= 4096


def test_a_tile_has_its_first_colour_where_there_is_no_room_for_all():
    mesh = Mesh(x=4, y=4, z=8)
    layout = Layout.parse("f32[{x:(1)2}8{x:(2)2}, {y:(1)2}8{y:(2)2}]", mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float32", [["x"], ["y"]]))
    figure = plan.draw("tiles")
    assert "its colour is that of the first one" in words(figure).replace("\n", " ")
    (seen, _), (target, _) = panels(plan, figure)
    assert len(seen.fills) == 1024 and len(target.fills) == 128


def test_512_devices_have_colours_and_no_labels():
    mesh = Mesh(x=8, y=8, z=8)
    plan = rs.plan(Layout.parse("bf16[{x}{y}{z}8, 4096]", mesh), Layout.parse("bf16[4096, {x}{y}{z}8]", mesh))
    (source, _), *_ = panels(plan)
    assert len({fill for _, fill in source.fills}) > 200 and len(source.fills) == 512 and not source.labels
    assert "device 511" in words(plan.draw("tiles"))


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_bars_are_the_live_bytes(name):
    plan = planned(name)
    axes = labelled(picture(name), "memory")
    tops = dict.fromkeys(range(len(moments(plan))), 0.0)
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            tops[round((left + right) / 2)] = max(tops[round((left + right) / 2)], high)
            assert low < high or not high
    assert list(tops.values())[1:-1] == [step.live_bytes for step in plan.steps]
    assert tops[0] == plan.source.tile_bytes
    heights = sorted({float(line.get_ydata()[0]) for line in axes.lines}, reverse=True)
    assert heights == sorted({plan.peak_bytes, plan.floor_bytes}, reverse=True)


@pytest.mark.parametrize("name", list(CASES))
def test_parts_add_up_to_what_is_live(name):
    for step in planned(name).steps:
        assert sum(size for _, size in parts(step)) == step.live_bytes


def test_memory_has_units_and_names():
    written = words(picture("three dims"))
    for word in (
        "source\n2048 B",
        "operand\n2048 B",
        "result\n2048 B",
        "scratch\n2048 B",
        "peak\n 6144 B",
        "floor\n 4096 B",
    ):
        assert word in written
    large = rs.plan(Layout.parse("f32[{x}4096, 8192]", Mesh(x=4)), Layout.parse("f32[16384, {x}2048]", Mesh(x=4)))
    assert re.search(r"\d MiB", words(large.draw("memory")))


# ---- traffic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_the_matrix_has_what_each_device_receives(name):
    plan = planned(name)
    memory = Account(plan.source.dtype)
    tiles = {device: np.ones(plan.source.tile_shape, plan.source.dtype) for device in plan.source.mesh.devices}
    rs.simulate(plan, tiles, memory)
    cells = labelled(picture(name), "traffic").images[0].get_array().filled(0)
    ids = sorted(plan.source.mesh.devices)
    assert cells.sum(axis=0).tolist() == [memory.received[device] for device in ids]
    assert not cells.diagonal().any()


@pytest.mark.parametrize("name", list(CASES))
def test_the_worst_device_is_said(name):
    plan = planned(name)
    written = words(picture(name))
    if not plan.received_bytes:
        assert "nothing moves" in written
        return
    assert f"receives {canvas.bytes_text(plan.received_bytes)}, as planned" in written


def test_less_than_planned_is_said():
    """Two steps that load devices unevenly have each another worst device."""
    mesh = Mesh(x=4)
    threes, fours = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[1{x}4/10]", mesh)
    plan = chain(threes, threes, [StepSpec("exchange", fours), StepSpec("exchange", threes)])
    assert plan.received_bytes == 16
    assert "receives 12 B of the 16 B planned" in words(plan.draw("traffic"))


def test_many_devices_share_a_row():
    mesh = Mesh(x=512)
    plan = rs.plan(Layout.parse("f32[{x}1, 512]", mesh), Layout.parse("f32[512, {x}1]", mesh))
    figure = plan.draw("traffic")
    cells = labelled(figure, "traffic").images[0].get_array().filled(0)
    assert cells.shape == (256, 256) and cells.sum() == 512 * plan.received_bytes
    assert "2 x 2 devices" in words(figure)


# ---- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_words_are_inside_the_figure_and_not_on_one_another(name):
    figure = picture(name)
    assert isinstance(figure, Figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for text in [*figure.texts, *shown_in_axes(figure)] if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    for at, (word, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, word
        for other, second in boxes[at + 1 :]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            tall = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert wide <= 1 or tall <= 2, f"{word!r} and {other!r}"


def shown_in_axes(figure):
    for axes in figure.axes:
        yield from axes.texts
        if axes.axison:
            yield from (*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label)


@pytest.mark.parametrize("what", ["tiles", "memory", "traffic"])
def test_each_picture_is_to_be_had_alone(what):
    names = {axes.get_label() for axes in planned("three dims").draw(what).axes} - {""}
    assert names == ({"source", "target"} if what == "tiles" else {what})


def test_a_figure_shows_itself_once_and_without_pyplot():
    figure = planned("two dims").draw()
    png, size = figure._repr_png_()
    assert png.startswith(b"\x89PNG") and size["width"] > 300
    code = "import sys, tests.draw.cases as c; c.planned('one dim').draw(); print('matplotlib.pyplot' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_lines_follow_the_style_and_fills_do_not():
    plan = planned("two dims")
    with matplotlib.style.context("dark_background"):
        dark = plan.draw("tiles")
    light = plan.draw("tiles")
    assert to_hex(dark.get_facecolor()) == "#000000" and to_hex(light.get_facecolor()) == "#ffffff"
    assert to_hex(dark.texts[0].get_color()) == "#ffffff" and to_hex(light.texts[0].get_color()) == "#000000"
    fills = [{fill for _, fill in Seen(labelled(figure, "source")).fills} for figure in (dark, light)]
    assert fills[0] == fills[1]


def test_colours_differ_for_every_number_of_devices():
    for count in (1, 2, 8, 9, 64, 128):
        assert len(set(canvas.colours(count))) == count


@pytest.mark.parametrize("what", ["bytes", "", "Tiles", 3])
def test_an_unknown_picture_is_refused(what):
    with pytest.raises(ReshardError, match="use one of tiles, memory, traffic, or None"):
        planned("one dim").draw(what)


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "reshard.draw.canvas"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("reshard.draw.canvas")
    with pytest.raises(ReshardError, match=r"pip install 'reshard\[draw\]'"):
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
