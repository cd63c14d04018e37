"""A figure as a person reads it: its words, and the panels of tiles by their ticks, fills and labels."""

import re
from itertools import product

import numpy as np
from matplotlib.colors import to_hex

from reshard.plans.plan import Plan
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning


def layouts(plan: Plan) -> list[Layout]:
    return [plan.source, *(step.result for step in plan.steps)]


def labelled(figure, label):
    """The axes of a figure that have a label."""
    (labelled_axes,) = [axes for axes in figure.axes if axes.get_label() == label]
    return labelled_axes


def panel_names(plan: Plan) -> list[str]:
    count = len(plan.steps)
    return ["source", *(f"after step {n}" for n in range(1, count)), "target"] if count else ["source and target"]


def words(figure) -> str:
    """All words in a figure."""
    every = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    titles = [axes.xaxis.label.get_text() for axes in figure.axes]
    ticks = [tick.get_text() for axes in figure.axes for tick in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return "\n".join([*(text.get_text() for text in every), *titles, *ticks])


class Seen:
    """A panel of tiles as a person reads it: ticks place its elements, fills and labels name their devices."""

    NAME = re.compile(r"dim (\d+) \((\d+)\)")
    SLICE = re.compile(r"dim (\d+): (\d+):(\d+)")

    def __init__(self, axes):
        texts = [(text.get_text(), text.get_position()) for text in axes.texts]
        names = [axes.xaxis.label.get_text(), *(word for word, _ in texts)]
        self.across = next((int(match[1]) for word in names if (match := self.NAME.fullmatch(word))), None)
        match = self.NAME.fullmatch(axes.yaxis.label.get_text())
        self.down = int(match[1]) if match else None
        ((self.left, self.wide),) = self.scales(axes.xaxis) or [(0, axes.get_xlim()[1])]
        rows = self.scales(axes.yaxis) or [(0, axes.get_ylim()[0])]
        slices = [self.SLICE.findall(word) for word, _ in texts if word.startswith("dim") and ": " in word]
        spans = [{int(dim): (int(start), int(stop)) for dim, start, stop in each} for each in slices] or [{}]
        self.slices = list(zip(rows, spans, strict=True))
        self.labels = [(word, at) for word, at in texts if re.fullmatch(r"(\w+=\d|[\d,. +-])+", word)]
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
        """The place of a point of an element, or None if it is not drawn."""
        for (top, tall), spans in self.slices:
            if all(start <= element[dim] < stop for dim, (start, stop) in spans.items()):
                x = 0 if self.across is None else element[self.across]
                y = 0 if self.down is None else element[self.down]
                return self.left + self.wide * (x + within[0]), top + tall * (y + within[1])
        return None

    def under(self, place, rank):
        """The element at a place, at index 0 of dims that are not drawn."""
        x, y = place
        (top, tall), spans = [each for each in self.slices if each[0][0] <= y][-1]
        known = {dim: start for dim, (start, _) in spans.items()}
        known |= {self.across: int((x - self.left) / self.wide), self.down: int((y - top) / tall)}
        return tuple(known.get(dim, 0) for dim in range(rank))

    def drawn(self, layout):
        """The elements that a panel shows, at index 0 of dims that are not drawn."""
        sliced = {dim for _, spans in self.slices for dim in spans}
        dims = {self.across, self.down, *sliced}
        return product(*(range(n if dim in dims else min(n, 1)) for dim, n in enumerate(layout.shape)))


def holders(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    """The devices of every element, padding included, by the layout's meaning."""
    held: dict[tuple[int, ...], set[int]] = {}
    for device in layout.mesh.devices:
        for element in product(*meaning(layout, device)):
            held.setdefault(element, set()).add(device)
    return held


def listed(label: str, mesh: Mesh) -> set[int]:
    """The devices that a label names, by their ids or by their coordinates."""
    devices: set[int] = set()
    for part in label.split(" + "):
        if "=" in part:
            fixed = {name: int(at) for name, at in (one.split("=") for one in part.split(","))}
            ids = np.reshape(mesh.devices, list(mesh.axes.values()))
            devices |= set(ids[tuple(fixed.get(name, slice(None)) for name in mesh.axes)].ravel().tolist())
            continue
        if match := re.fullmatch(r"(\d+),(\d+),\.\.,(\d+)", part):
            first, second, last = map(int, match.groups())
            devices |= set(range(first, last + 1, second - first))
            continue
        for run in part.split(","):
            first, _, last = run.partition("-")
            devices |= set(range(int(first), int(last or first) + 1))
    return devices


def panels(plan: Plan, figure=None):
    """Each panel of the picture of the tiles, with its layout."""
    figure = figure or plan.draw("tiles")
    return [(Seen(labelled(figure, name)), at) for name, at in zip(panel_names(plan), layouts(plan), strict=True)]
