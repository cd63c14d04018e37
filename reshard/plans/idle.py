"""The idle axes of a plan: those that neither of its ends uses, and that carry bytes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.types.layout import Layout
from reshard.types.mesh import prime_places
from reshard.types.units import listed


def find_idle_axes(source: Layout, target: Layout, between: Iterable[Layout]) -> tuple[str, ...]:
    """The sub-axes that layouts on the way use and neither end does, major first: it is replicated along them.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2, y=4)
    >>> rows, whole, over = (Layout.parse(text, mesh) for text in ("f32[{x}4]", "f32[8]", "f32[2{y}]"))
    >>> find_idle_axes(rows, whole, [over])
    ('y',)
    """
    mesh = source.mesh
    if target.mesh != mesh:
        return ()
    way = {prime for layout in between if layout.mesh == mesh for prime in _list_used_primes(layout)}
    free = sorted(way - set(_list_used_primes(source)) - set(_list_used_primes(target)))
    joined: list[tuple[int, int]] = []
    for stride, size in free:
        axis = mesh.axis_at(stride)
        if joined and joined[-1][0] * joined[-1][1] == stride and mesh.axis_at(joined[-1][0]) == axis:
            stride, size = joined[-1][0], joined.pop()[1] * size
        joined.append((stride, size))
    return tuple(mesh.spell(sub) for stride, size in reversed(joined) for sub in mesh.sub_axes(stride, size))


def describe_idle_axes(axes: Sequence[str], before: str = "") -> str:
    """The idle axes in a sentence, after what goes before them; nothing if there are none.

    >>> describe_idle_axes(["x", "y"], "over ")
    'over the idle axes x and y'
    """
    if not axes:
        return ""
    return f"{before}the idle {'axis' if len(axes) == 1 else 'axes'} {listed(axes)}"


def _list_used_primes(layout: Layout) -> list[tuple[int, int]]:
    """The (stride, prime) factors of the device positions that hold digits or are partial."""
    return [prime for axis in (*layout.held, *layout.partial) for prime in prime_places(layout.mesh, axis)]
