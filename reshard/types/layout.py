"""Layouts: each dimension a numeral whose digits are local or held by a mesh sub-axis.

The invariants, by the names they have in `docs/language.md`: *exact cover*, *single use*,
*radix match*, *canonical form*, *one reduction*. A `Layout` that exists keeps them all, and two
layouts of equal meaning are equal objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError, about_sharding
from reshard.types import dtypes, reductions
from reshard.types.dims import Digit as Digit
from reshard.types.dims import Dim as Dim
from reshard.types.dims import checked_size
from reshard.types.dims import fitted as fitted
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation import text

if TYPE_CHECKING:
    from reshard.types.notation.sharding import Placed


@dataclass(frozen=True)
class Layout:
    """An array's element type, its dims, and the sub-axes over which it is still partial.

    Raises `LayoutError` when an invariant is broken. Sizes are elements, `tile_bytes` is bytes.

    >>> mesh = Mesh(x=4, y=2)
    >>> a = Layout.parse("f32[{y}8, 16, {x}4]", mesh)
    >>> a.shape, a.tile_shape, a.tile_bytes, str(a)
    ((16, 16, 16), (8, 16, 4), 2048, 'f32[{y}8, 16, {x}4]')
    """

    mesh: Mesh
    dims: tuple[Dim, ...]
    dtype: str
    reduction: str | None = None
    partial: tuple[SubAxis, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "dtype", dtypes.canonical(self.dtype))
        put(self, "dims", tuple(_canonical_dim(dim, self.mesh, at) for at, dim in enumerate(self.dims)))
        put(self, "partial", _canonical_partial(self.partial, self.mesh))
        if not self.partial:
            put(self, "reduction", None)
        _check_single_use(self.mesh, (*self.held, *self.partial))
        _check_reduction(self)

    @classmethod
    def parse(cls, source: str, mesh: Mesh) -> Layout:
        """Reads the text form, `f32[{y}8, 16, {x}4] + sum{z}`; `str()` writes it back.

        Raises `NotationError` for text that does not parse, `MeshError` for unknown axes,
        `LayoutError` for a broken invariant.
        """
        raw = text.parse(source)
        dims: list[Dim] = []
        for part in raw.dims:
            digits = [
                Digit(d, None) if isinstance(d, int) else Digit((axis := mesh.sub_axis(d)).size, axis)
                for d in part.digits
            ]
            size = math.prod(d.radix for d in digits) if part.size is None else part.size
            dims.append(Dim(tuple(digits), size))
        return cls(mesh, tuple(dims), raw.dtype, raw.reduction, tuple(mesh.sub_axis(a) for a in raw.partial))

    @classmethod
    def tiled(
        cls,
        mesh: Mesh,
        shape: Sequence[int],
        dtype: object,
        axes: Sequence[Iterable[SubAxis]],
        partial: Iterable[SubAxis] = (),
        reduction: str | None = None,
    ) -> Layout:
        """Contiguous tiles: each dim in ceil(size / pieces) elements a piece, axes major to minor."""
        if len(axes) != len(shape):
            raise LayoutError(
                f"{len(axes)} dims of axes for global shape {tuple(shape)} of rank {len(shape)}; "
                f"give one list of axes per dim ([] for a dim that is not split)"
            )
        dims: list[Dim] = []
        for size, held in zip(shape, axes, strict=True):
            digits = [Digit(mesh.checked(sub).size, sub) for sub in held]
            pieces = math.prod(d.radix for d in digits)
            dims.append(Dim((*digits, Digit(-(-checked_size(size) // pieces), None)), checked_size(size)))
        held_partial = tuple(partial)
        op = (reduction or "sum") if held_partial else None
        return cls(mesh, tuple(dims), dtypes.canonical(dtype), op, held_partial)

    @classmethod
    def from_spec(
        cls,
        mesh: Mesh,
        shape: Sequence[int],
        dtype: object,
        spec: Sequence[Sequence[str] | str | None],
        *,
        unreduced: Sequence[str] = (),
        reduction: str = "sum",
    ) -> Layout:
        """From axes per dim, major to minor, as in `PartitionSpec`; sub-axes as `"y:(1)2"`.

        Dims past the end of the spec are not split. Uneven sizes pad as in GSPMD.

        >>> str(Layout.from_spec(Mesh(x=4, y=2), (10, 16), "float32", [["x"], []]))
        'f32[{x}3/10, 16]'
        """
        if len(spec) > len(shape):
            raise LayoutError(
                f"spec {list(spec)} has {len(spec)} entries for global shape {tuple(shape)} of rank "
                f"{len(shape)}; give at most one entry per dim"
            )
        names: list[Sequence[str]] = [[s] if isinstance(s, str) else list(s or ()) for s in spec]
        names += [[]] * (len(shape) - len(names))
        axes = [[mesh.sub_axis(name) for name in dim] for dim in names]
        return cls.tiled(mesh, shape, dtype, axes, [mesh.sub_axis(n) for n in unreduced], reduction)

    @classmethod
    def from_shardy(cls, source: str, mesh: Mesh | None, shape: Sequence[int], dtype: object) -> Layout:
        """From a Shardy sharding; its mesh may be None where the text writes one itself.

        >>> str(Layout.from_shardy('[{"y"}, {"x":(1)2}]', Mesh(x=4, y=2), (16, 16), "float32"))
        'f32[{y}8, {x:(1)2}8]'
        """
        from reshard.types.notation import shardy
        from reshard.types.notation.sharding import place

        raw = shardy.parse(source)
        with about_sharding(source, shape):
            return cls._placed(place(raw, mesh), shape, dtype)

    @classmethod
    def from_hlo(cls, source: str, shape: Sequence[int], dtype: object, *, num_devices: int = 1) -> Layout:
        """From an HLO sharding, on a mesh made for it: axes d0, d1, ..., unless the text names its own.

        `num_devices` is needed only where the text does not say how many, as in `{replicated}`.

        >>> a = Layout.from_hlo("{devices=[2,1,4]<=[4,2]T(1,0)}", (16, 16, 16), "float32")
        >>> str(a.mesh), str(a)
        ('<d0=4, d1=2>', 'f32[{d1}8, 16, {d0}4]')
        """
        from reshard.types.notation import hlo

        raw = hlo.parse(source)
        with about_sharding(source, shape):
            return cls._placed(hlo.placed(raw, len(shape), num_devices), shape, dtype)

    @classmethod
    def from_jax_text(cls, source: str, mesh: Mesh, shape: Sequence[int], dtype: object) -> Layout:
        """From the text of a JAX `PartitionSpec`; dims past its end are not split.

        >>> str(Layout.from_jax_text("P(('x', 'y'), None)", Mesh(x=4, y=2), (16, 16), "float32"))
        'f32[{x}{y}2, 16]'
        """
        from reshard.types.notation import partition_spec
        from reshard.types.notation.sharding import place

        raw = partition_spec.parse(source)
        with about_sharding(source, shape):
            return cls._placed(place(raw.padded(len(shape)), mesh), shape, dtype)

    @classmethod
    def from_jax(cls, sharding: Any, shape: Sequence[int], dtype: object) -> Layout:
        """From a `jax.sharding.NamedSharding`, on its mesh's devices; uneven sizes pad as in XLA."""
        from reshard.types.notation import jax_sharding
        from reshard.types.notation.sharding import place

        with about_sharding(str(sharding), shape):
            raw = jax_sharding.read(sharding, len(shape))
            return cls._placed(place(raw, jax_sharding.mesh_of(sharding.mesh)), shape, dtype)

    @classmethod
    def from_dtensor(
        cls,
        placements: Sequence[Any],
        mesh: Mesh | Sequence[int],
        shape: Sequence[int],
        dtype: object,
        *,
        names: Sequence[str] | None = None,
    ) -> Layout:
        """From PyTorch's DTensor placements, one per mesh dim; torch itself is not needed.

        The mesh is one of ours or its shape, whose axes are then `names`, or d0, d1, ...

        >>> str(Layout.from_dtensor(["S(0)", "R"], (2, 4), (16, 8), "float32"))
        'f32[{d0}8, 8]'
        """
        from reshard.types.notation import dtensor

        found = mesh if isinstance(mesh, Mesh) else dtensor.mesh(mesh, names)
        raw = dtensor.read(placements, tuple(found.axes.values()), shape)
        axes = [SubAxis(name, 1, size) for name, size in found.axes.items()]

        def dim(digits: Sequence[tuple[int, int | None]], size: int) -> Dim:
            return Dim(tuple(Digit(radix, None if at is None else axes[at]) for radix, at in digits), size)

        dims = tuple(dim(digits, size) for digits, size in zip(raw.dims, shape, strict=True))
        return cls(found, dims, dtypes.canonical(dtype), raw.reduction, tuple(axes[at] for at in raw.partial))

    @classmethod
    def from_scalapack(
        cls, desc: Sequence[int], grid: Sequence[int], dtype: object = "float64", *, order: str = "R"
    ) -> Layout:
        """From a ScaLAPACK descriptor on a grid of processes, numbered by rows ("R") or columns ("C"); its devices.

        >>> str(Layout.from_scalapack([1, 0, 1000, 800, 64, 32, 0, 0, 512], (2, 3)))
        'f64[8{r}64/1000, 9{c}32/800]'
        """
        from reshard.types.notation import scalapack

        mesh, dims = scalapack.read(desc, grid, order)

        def dim(size: int, block: int, name: str) -> Dim:
            axis = SubAxis(name, 1, mesh.axes[name])
            return fitted((Digit(axis.size, axis), Digit(block, None)), size)

        return cls(mesh, tuple(dim(*each) for each in dims), dtypes.canonical(dtype))

    def to_jax(self, jax_mesh: Any) -> Any:
        """The `NamedSharding` of contiguous tiles on whole axes of a jax mesh of the same devices.

        Raises `LayoutError` for what a `NamedSharding` cannot say, `MeshError` for other devices.
        """
        from reshard.types.notation import jax_sharding

        held = [[d.axis for d in dim.digits if d.axis is not None] for dim in self.dims]
        if Layout.tiled(self.mesh, self.shape, self.dtype, held, self.partial, self.reduction) != self:
            raise LayoutError(
                f"{self}: a NamedSharding says contiguous tiles only; reshape so that each local digit before a held "
                f"one is a dim of its own, and shard that array"
            )
        return jax_sharding.write(self.mesh, held, self.partial, self.reduction, jax_mesh)

    @classmethod
    def _placed(cls, placed: Placed, shape: Sequence[int], dtype: object) -> Layout:
        _check_single_use(placed.mesh, [*(axis for dim in placed.dims for axis in dim), *placed.partial, *placed.idle])
        return cls.tiled(placed.mesh, shape, dtype, placed.dims, placed.partial, placed.reduction)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The true global shape."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape rounded up to whole pieces."""
        return tuple(dim.padded for dim in self.dims)

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of the tile that every device holds, padding included."""
        return tuple(dim.tile for dim in self.dims)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of one tile, padding included."""
        return self.nbytes(math.prod(self.tile_shape))

    @cached_property
    def even(self) -> bool:
        """Whether no dim is padded."""
        return self.shape == self.padded_shape

    @cached_property
    def held(self) -> tuple[SubAxis, ...]:
        """The sub-axes that hold digits, dim by dim, major to minor."""
        return tuple(d.axis for dim in self.dims for d in dim.digits if d.axis is not None)

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements of this layout's dtype."""
        return dtypes.nbytes(elements, self.dtype)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        # Built anew: hashes of text differ from process to process, so the cached one must stay behind.
        return Layout, (self.mesh, self.dims, self.dtype, self.reduction, self.partial)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.dtype, self.reduction, self.partial))

    @cached_property
    def _text(self) -> str:
        dims = ", ".join(_dim_text(dim, self.mesh) for dim in self.dims)
        axes = "".join(f"{{{self.mesh.spell(a)}}}" for a in self.partial)
        return f"{dtypes.short(self.dtype)}[{dims}]" + (f" + {self.reduction}{axes}" if axes else "")

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Layout.parse({str(self)!r}, {self.mesh!r})"


def _canonical_dim(dim: Dim, mesh: Mesh, at: int) -> Dim:
    """Merges and drops digits, and checks *exact cover* and *radix match*."""
    size = dim.size
    if size == 0:  # An empty dim has one meaning, whoever holds its nothing.
        for digit in dim.digits:
            _check_radix(digit, mesh)
        return Dim((Digit(0, None),), 0)
    digits: list[Digit] = []
    for digit in dim.digits:
        radix, axis = digit
        if axis is not None:
            _check_radix(digit, mesh)
        if radix == 1:
            continue
        last = digits[-1] if digits else None
        if last is None or (last.axis is None) != (axis is None):
            digits.append(digit)
        elif axis is None or last.axis is None:
            digits[-1] = Digit(last.radix * radix, None)
        elif last.axis.axis == axis.axis and last.axis.pre * last.axis.size == axis.pre:
            digits[-1] = Digit(last.radix * radix, SubAxis(axis.axis, last.axis.pre, radix * last.radix))
        else:
            digits.append(digit)
    if any(d.radix == 1 and d.axis is not None for d in dim.digits) and digits and digits[0].axis is None:
        # Block-cyclic over an axis of one device: rounds and blocks merge, and none is padded.
        unit = math.prod(d.radix for d in digits[1:])
        rounds = min(digits.pop(0).radix, -(-size // unit))
        digits[:0] = [Digit(rounds, None)] if rounds > 1 else []
        _check_cover(digits, size, rounds == 1, at)
        return Dim(tuple(digits), size)
    _check_cover(digits, size, dim.digits[:1] == ((1, None),), at)
    return Dim(tuple(digits), size)


def _check_cover(digits: list[Digit], size: int, one_round: bool, at: int) -> None:
    """*Exact cover*: the padded size is the smallest multiple, of all but the first local digit,
    that fits. One round of a block-cyclic deal says so with a leading 1, kept only if it is needed.
    """
    padded = math.prod(d.radix for d in digits)
    if padded == size:
        return
    rounds = next((d.radix for d in digits if d.axis is None), 1)
    if rounds > 0 and size <= padded and padded - size < padded // rounds:
        return
    if one_round and size <= padded and digits[0].axis is not None:
        digits.insert(0, Digit(1, None))
        return
    unit = math.prod(d.radix for d in digits if d.axis is not None) if rounds == 0 else padded // rounds
    best = -(-size // unit) * unit
    raise LayoutError(
        f"dim {at}: the radices multiply to {padded}, but the true size is {size}, whose smallest fitting "
        f"multiple of {unit} is {best}; change the local digit so that the product is {best} (exact cover)"
    )


def _check_radix(digit: Digit, mesh: Mesh) -> None:
    """*Radix match*: a held digit's radix is its sub-axis's size."""
    if digit.axis is None:
        return
    mesh.checked(digit.axis)
    if digit.radix != digit.axis.size:
        raise LayoutError(
            f"a digit of radix {digit.radix} is held by {mesh.spell(digit.axis)} of size {digit.axis.size} in mesh "
            f"{mesh}; a held digit's radix is its sub-axis's size (radix match)"
        )


def _canonical_partial(partial: Iterable[SubAxis], mesh: Mesh) -> tuple[SubAxis, ...]:
    """Sorted major to minor and merged: the order of a reduction has no meaning."""
    merged: list[SubAxis] = []
    for sub in sorted((s for s in partial if mesh.checked(s).size > 1), key=mesh.stride, reverse=True):
        last = merged[-1] if merged else None
        if last is not None and last.axis == sub.axis and last.pre * last.size == sub.pre:
            merged[-1] = SubAxis(sub.axis, last.pre, last.size * sub.size)
        else:
            merged.append(sub)
    return tuple(merged)


def _check_single_use(mesh: Mesh, used: Iterable[SubAxis]) -> None:
    """*Single use*: sub-axes neither repeat nor overlap, and split each axis into whole factors."""
    by_axis: dict[str, list[SubAxis]] = {}
    for sub in used:
        if sub.size > 1:
            by_axis.setdefault(sub.axis, []).append(sub)
    for axis, subs in by_axis.items():
        if len(subs) == 1:
            continue
        subs.sort(key=lambda s: s.pre)
        for major, minor in pairwise(subs):
            if minor.pre % (major.pre * major.size):
                raise LayoutError(
                    f"axis {axis!r} of mesh {mesh} is used as {mesh.spell(major)} and as {mesh.spell(minor)}, which "
                    f"overlap; use every part of an axis once, partial axes included (single use)"
                )


def _check_reduction(layout: Layout) -> None:
    """*One reduction*: partial axes come with one operation that the dtype has."""
    if not layout.partial:
        return
    if layout.reduction not in reductions.REDUCTIONS:
        raise LayoutError(f"reduction {layout.reduction!r} is unknown; use one of {', '.join(reductions.REDUCTIONS)}")
    if not reductions.supports(layout.dtype, layout.reduction):
        raise LayoutError(
            f"{layout.dtype} has no {layout.reduction} reduction; for bool use max (any) or min (all), "
            f"for complex sum, mean or product, and mean only for inexact types"
        )


def _dim_text(dim: Dim, mesh: Mesh) -> str:
    digits = "".join(str(d.radix) if d.axis is None else f"{{{mesh.spell(d.axis)}}}" for d in dim.digits)
    return (digits or "1") if dim.padded == dim.size else f"{digits}/{dim.size}"
