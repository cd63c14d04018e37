"""What numpy computes with arrays, and what `DistArray` computes or refuses: on ranks, in layouts of every kind.

`ROWS` are expressions of `a` and `b`, two arrays of one shape and layout, `c` with as many rows as `a` has columns, `v`
with one dim, `s` without dims, and `n`, numpy's array with the elements of `a`. They make a table of
docs/reference/numpy.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.errors import LayoutError, ReshardError
from reshard.mpi import DistArray
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh, Pieces
from reshard.types.layout import Digit, Dim
from tests.mpi.worker import Case

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "numpy.md"
BEGIN, END = "<!-- conformance: begin -->\n", "<!-- conformance: end -->\n"

ROWS = {
    "elementwise": [
        "np.sqrt(abs(a)) + 2 * b",
        "a == b",
        "np.divmod(a, b)[1]",
        "a - a.mean(axis=0)",
        "a - a.mean(axis=0, keepdims=True)",
        "np.where(a > b, a, 0)",
        "np.isclose(a, b)",
        "np.real(a) - a.imag",
        "a.astype('complex64')",
        "a.copy()",
        "np.zeros_like(a)",
        "a + n",
        "n[:1] - a",
        "np.clip(a, -2, n)",
        "np.round(a / 3, 1)",
        "a + v.reshape(1, -1).T",
    ],
    "reductions": [
        "np.sum(a)",
        "a.sum(axis=0)",
        "np.sum(a, axis=-1, keepdims=True)",
        "np.sum(a, dtype='complex128')",
        "np.add.reduce(a)",
        "a.prod(axis=(0, 1))",
        "a.min()",
        "np.max(a, axis=0)",
        "np.maximum.reduce(a, axis=1)",
        "np.mean(a, axis=1)",
        "np.std(a, axis=0)",
        "a.var(ddof=1)",
        "np.argmax(a)",
        "a.argmin(axis=0)",
        "np.argmax(a, axis=1, keepdims=True)",
        "np.count_nonzero(a, axis=0)",
        "a.any(axis=0)",
        "np.all(a)",
        "np.linalg.norm(a)",
        "np.linalg.norm(a, 1, axis=0)",
        "np.linalg.norm(a, np.inf)",
        "np.linalg.norm(a, 2)",
        "np.sum(a, where=n > 0)",
        "np.add.accumulate(a)",
        "a.cumsum(axis=1)",
        "np.cumprod(v)",
        "np.cumsum(a)",
        "np.median(a)",
    ],
    "products": [
        "a @ c",
        "a.T @ b",
        "a @ v",
        "v @ v",
        "np.dot(a, c)",
        "np.dot(a, 3)",
        "np.tensordot(a, b)",
        "np.tensordot(a, c, ([1], [0]))",
        "a @ n.T",
        "np.vecdot(a, b)",
        "np.einsum('ij,ij->i', a, b)",
        "np.add.outer(a, b)",
    ],
    "shapes": [
        "a.T",
        "np.transpose(a, (1, 0))",
        "a.reshape(1, *a.shape)",
        "np.concatenate([a, b, a])",
        "np.concatenate([a, b], axis=1)",
        "np.stack([a, b], axis=1)",
        "np.squeeze(a[:1])",
        "np.expand_dims(a, (0, 2))",
        "np.flip(a, axis=0)",
        "np.moveaxis(a[None], 0, -1)",
        "a[1:]",
        "a[::-2, 1]",
        "a[..., None, 0]",
        "a[0, 0]",
        "a[[0, 0]]",
        "a[a > 0]",
        "np.sort(a)",
    ],
    "comparisons and numbers": [
        "np.array_equal(a, b)",
        "np.array_equal(a, a.copy())",
        "np.allclose(a, b)",
        "np.array_equal(a, n)",
        "bool(a == b)",
        "(a == b).all()",
        "bool(s == s)",
        "complex(s)",
        "a.shape, a.ndim, a.size, len(a), np.size(a)",
        "np.asarray(a)",
        "list(a)",
        "float(a)",
        "np.testing.assert_array_equal(a, b)",
    ],
}
REFUSED = {
    "np.linalg.norm(a, 2)",
    "np.sum(a, where=n > 0)",
    "np.median(a)",
    "np.einsum('ij,ij->i', a, b)",
    "np.add.outer(a, b)",
    "a[[0, 0]]",
    "a[a > 0]",
    "np.sort(a)",
    "np.asarray(a)",
    "list(a)",
    "np.testing.assert_array_equal(a, b)",
}
BY_LAYOUT = {"np.cumsum(a)", "a + v.reshape(1, -1).T", "a.reshape(1, *a.shape)"}
"""Right where the layouts allow it, else a `LayoutError`."""


def layouts(size: int) -> Iterator[tuple[str, Layout, Layout, Layout]]:
    """Layouts of `a`, `c` and `v` on so many ranks: even, uneven, block-cyclic, replicated, on a grid, nearly empty."""
    down = 2 if size % 2 == 0 else 1
    line, grid = Mesh(x=size), Mesh({"x": size // down, "y": down}, device_ids=[*range(size)][::-1])
    for rows, columns in ((2 * size, 4 * size), (7, 5), (1, 3), (0, 3)):
        for name, mesh, ends in (
            ("rows", line, ["x.", ".x", "."]),
            ("columns", line, [".x", "x.", "x"]),
            ("grid", grid, ["xy", "yx", "y"]),
        ):
            yield f"{name} {rows}x{columns}", *_placed(mesh, ends, rows, columns, 0)
    yield "replicated", *_placed(line, ["..", "..", "."], 5, 4, 0)
    yield "cyclic", *_placed(grid, ["xy", "xy", "x"], 11, 7, 2)
    yield "cyclic rows", *_placed(line, ["x.", "x.", "x"], 4 * size + 1, 3, 1)
    for name, mesh, ends in (("rows", line, ["x.", ".x", "."]), ("grid", grid, ["xy", "yx", "y"])):
        yield f"{name} by owner", *_placed(mesh, ends, 11, 7, -1)
        yield f"{name} in pieces", *_placed(mesh, ends, 6, 5, -2)


def _placed(mesh: Mesh, ends: list[str], rows: int, columns: int, block: int) -> Iterator[Layout]:
    for axes, shape in zip(ends, ((rows, columns), (columns, 6), (columns,)), strict=True):
        dims = [_dim(mesh, axis, size, block) for axis, size in zip(axes.ljust(len(shape), "."), shape, strict=True)]
        yield Layout(mesh, tuple(dims), "float64")


def _dim(mesh: Mesh, axis: str, size: int, block: int) -> Dim:
    if axis == ".":
        return Dim((Digit(size, None),), size)
    held = Digit(mesh.axes[axis], mesh.sub_axis(axis))
    if block < 0:  # A piece of any size for each coordinate, of which some have nothing.
        owners = np.random.default_rng(size).integers(0, held.radix, size)
        pieces = Pieces.from_owners(owners if block == -1 else np.sort(owners), held.radix)
        return Dim((held, Digit(pieces.largest, None)), size, pieces)
    if not block:
        return Dim((held, Digit(-(-size // held.radix), None)), size)
    return Dim((Digit(-(-size // (held.radix * block)), None), held, Digit(block, None)), size)


def arrays(comm: MPI.Intracomm, places: tuple[Layout, ...], dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names of the expressions: distributed, and of numpy. Tiles have padding that would show in any result."""
    rng = np.random.default_rng(3)
    first, third, vector = places
    wholes = {
        name: (rng.integers(-9, 9, layout.shape) * (1 + 2j if dtype.startswith("complex") else 1)).astype(dtype)
        for name, layout in (("a", first), ("b", first), ("c", third), ("v", vector), ("s", _scalar(first)))
    }
    kinds = {"a": first, "b": first, "c": third, "v": vector, "s": _scalar(first)}
    made = {name: distributed(comm, whole, kinds[name]) for name, whole in wholes.items()}
    for names in (wholes, made):
        names["n"], names["np"] = wholes["a"], np
    return made, wholes


def _scalar(layout: Layout) -> Layout:
    return Layout(layout.mesh, (), layout.dtype)


def distributed(comm: MPI.Intracomm, whole: np.ndarray, layout: Layout) -> DistArray:
    """The whole array in a layout, with padding that is neither zero nor small."""
    named = Layout(layout.mesh, layout.dims, whole.dtype.name)
    made = DistArray.from_global(whole, named, comm, root=None)
    inside = DistArray.from_global(
        np.ones(whole.shape, bool), Layout(layout.mesh, layout.dims, "bool"), comm, root=None
    )
    made.tile[~inside.tile] = 99
    return made


def outcome(expression: str, names: dict[str, Any]) -> Any:
    """The value of an expression, or the error that it raises."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return eval(expression, names)
        except (TypeError, ValueError, IndexError, AssertionError) as error:
            return error


def values(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every expression in every layout and dtype has numpy's result on every rank, or is refused on every rank."""
    for number, dtype in enumerate(("int32", "float64", "complex128", "bool")):
        for name, *places in islice(layouts(comm.size), number % 2, None, 2 if dtype != "float64" else 1):
            yield f"{dtype} {name}", partial(_checked, comm, tuple(places), dtype)


def values_sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A sample of these cases, for the fast tier."""
    yield from islice(values(comm), None, None, 11)


def _checked(comm: MPI.Intracomm, places: tuple[Layout, ...], dtype: str) -> None:
    made, wholes = arrays(comm, places, dtype)
    wrong: list[str] = []
    for expression in (each for rows in ROWS.values() for each in rows):
        given, wanted = outcome(expression, made), outcome(expression, wholes)
        kinds = comm.allgather(f"{type(given).__name__} {given if isinstance(given, Exception) else ''}")
        try:
            assert len(set(kinds)) == 1, kinds
            _compared(expression, given, wanted)
        except AssertionError as error:
            wrong.append(f"{expression}: {error}")
    assert not wrong, "\n".join(wrong)


def _compared(expression: str, given: Any, wanted: Any) -> None:
    if expression in REFUSED or (expression in BY_LAYOUT and isinstance(given, Exception)):
        assert isinstance(given, TypeError | ReshardError), given
        assert "to_global" in str(given) or isinstance(given, LayoutError), given
    elif isinstance(wanted, Exception):
        assert isinstance(given, Exception), f"{given}, numpy raises {wanted!r}"
    else:
        _same(given, wanted)


def _same(given: Any, wanted: Any) -> None:
    assert not isinstance(given, Exception), repr(given)
    if isinstance(wanted, np.ndarray) and wanted.ndim:
        assert isinstance(given, DistArray), given
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
        assert given.tile.shape == given.layout.tile_shape
        given = given.to_global(None)
    elif isinstance(wanted, np.ndarray):  # numpy's tensordot, which returns an array without dims
        assert type(given) is wanted.dtype.type, (given, wanted)
    else:
        assert isinstance(given, type(wanted)), (type(given), type(wanted))
    if isinstance(wanted, np.ndarray | np.generic) and wanted.dtype.kind in "fc":
        assert np.allclose(given, wanted, rtol=1e-5 if wanted.dtype == "complex64" else 1e-12, equal_nan=True), (
            given,
            wanted,
        )
    else:
        assert given == wanted if isinstance(wanted, tuple) else np.array_equal(given, wanted), (given, wanted)


def table(comm: MPI.Intracomm) -> str:
    """The lists of docs/reference/numpy.md, as it runs on these ranks, with rows of `a` split."""
    places = next(tuple(each[1:]) for each in layouts(comm.size) if each[0] == "rows 7x5")
    made, _ = arrays(comm, places, "float64")
    made["c"] = made["c"].redistribute(Layout.from_spec(places[0].mesh, (5, 6), "float64", [["x"]]))
    lines: list[str] = []
    for section, rows in ROWS.items():
        kinds: dict[str, list[str]] = {}
        for expression in rows:
            before = team_of(comm).calls
            given = outcome(expression, made)
            moved = "moves data" if team_of(comm).calls > before else "local"
            kind = f"`{type(given).__name__}`" if isinstance(given, Exception) else moved
            kinds.setdefault(kind, []).append(f"`{expression}`")
        lines += [f"**{section.capitalize()}**", "", *(f"- {kind}: {', '.join(of)}" for kind, of in kinds.items()), ""]
    return "".join(f"{line}\n" for line in lines)


def documented(comm: MPI.Intracomm) -> Iterator[Case]:
    """The lists in docs/reference/numpy.md are those that run on 3 ranks."""

    def same() -> None:
        shown = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        wanted = table(comm)
        assert shown == wanted, f"replace the lists between the marks in docs/reference/numpy.md by these:\n{wanted}"

    yield "docs/reference/numpy.md", same
