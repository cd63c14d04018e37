"""Layouts: where each element of an array is. Each dim is a numeral whose digits are local or held by a sub-axis.

A layout is checked and brought to its canonical form when it is built (`types.dims`), so that two layouts of
equal meaning are equal objects.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from reshard.errors import LayoutError, MeshError, about_sharding, name_arguments, quoted
from reshard.types import dtypes
from reshard.types.dims import Digit as Digit
from reshard.types.dims import Dim as Dim
from reshard.types.dims import (
    canonical_dim,
    canonical_partial,
    check_one_reduction,
    check_single_use,
    checked_shape,
    checked_size,
    tabulate_pieces,
    true_extent,
)
from reshard.types.dims import fit_digits as fit_digits
from reshard.types.mesh import Mesh, MeshLike, SubAxis
from reshard.types.notation import text
from reshard.types.pieces import Pieces, read_offsets
from reshard.types.whole import MOST_LISTED, read_items, whole

if TYPE_CHECKING:
    from reshard.types.notation.sharding import Placed


@dataclass(frozen=True)
class Layout:
    """An array's element type, its dims, and the sub-axes over which it is partial.

    For example f32[2{x}3, {y}5] on <x=4, y=2>, an array of 24 x 10. On device 5, which is at x=2, y=1:

        dim   digit   radix   holder   place   value on device 5
         0    2         2     local     12     0, 1
         0    {x}       4     x          3     2
         0    3         3     local      1     0, 1, 2
         1    {y}       2     y          5     1
         1    5         5     local      1     0, 1, 2, 3, 4

    A digit's place is the product of the radices after it. The sums of value times place are the indices that the
    device holds: a tile of 6 x 5.

    >>> from reshard.types.meaning import meaning
    >>> layout = Layout.parse("f32[2{x}3, {y}5]", Mesh(x=4, y=2))
    >>> layout.shape, layout.tile_shape, layout.tile_bytes
    ((24, 10), (6, 5), 120)
    >>> meaning(layout, 5)
    ((6, 7, 8, 18, 19, 20), (5, 6, 7, 8, 9))

    Sizes are in elements, `tile_bytes` is in bytes. Raises `LayoutError` for a broken invariant
    (docs/reference/language.md).
    """

    mesh: Mesh
    dims: tuple[Dim, ...] = ()
    dtype: str = ""
    reduction: str | None = None
    partial: tuple[SubAxis, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str) and "[" in self.mesh:
            raise LayoutError(
                f"a Layout is made of dims, not of text; read {quoted(self.mesh)} with Layout.parse(text, mesh)"
            )
        put = object.__setattr__
        put(self, "mesh", checked_mesh(self.mesh))
        for name in ("dims", "partial"):
            if not isinstance(getattr(self, name), tuple):
                put(self, name, _listed_axes(getattr(self, name), name))
        put(self, "dtype", dtypes.canonical(self.dtype))
        put(self, "dims", tuple(canonical_dim(dim, self.mesh, at) for at, dim in enumerate(self.dims)))
        put(self, "partial", canonical_partial(self.partial, self.mesh))
        check_single_use(self.mesh, (*self.held, *self.partial))
        if self.partial:
            check_one_reduction(self.dtype, self.reduction)
        else:
            put(self, "reduction", None)

    @classmethod
    @name_arguments
    def parse(cls, source: str, mesh: MeshLike) -> Layout:
        """Reads text such as `f32[{y}8, 16, {x}4] + sum{z}`; `str()` writes it.

        Raises `NotationError` for text that does not parse, `MeshError` for unknown axes, and `LayoutError` for a
        broken invariant.

        >>> print(Layout.parse("f32[{x:(1)2}{x:(2)2}4, 16]", Mesh(x=4, y=2)))
        f32[{x}4, 16]
        """
        mesh = checked_mesh(mesh)
        raw = text.parse_layout(source)
        dims: list[Dim] = []
        for part in raw.dims:
            digits = [
                Digit(d, None) if isinstance(d, int) else Digit((axis := mesh.sub_axis(d)).size, axis)
                for d in part.digits
            ]
            size = math.prod(d.radix for d in digits) if part.size is None else part.size
            if part.runs is None:
                dims.append(Dim(tuple(digits), size))
                continue
            count = math.prod(d.radix for d in digits if d.axis is not None)
            lengths, numbers = part.runs or (None, None)
            if lengths is None or numbers is None:
                pieces = Pieces.even(checked_size(size), count)
            else:
                pieces = Pieces(lengths, numbers, count) if numbers else Pieces.from_sizes(lengths)
            dims.append(Dim((*digits, Digit(pieces.largest, None)), size, pieces))
        return cls(mesh, tuple(dims), raw.dtype, raw.reduction, tuple(mesh.sub_axis(a) for a in raw.partial))

    @classmethod
    def tiled(
        cls,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        axes: Sequence[Iterable[SubAxis]],
        partial: Iterable[SubAxis] = (),
        reduction: str | None = None,
    ) -> Layout:
        """Contiguous tiles: each dim in pieces of ceil(size / pieces) elements, its axes major to minor.

        >>> mesh = Mesh(x=4, y=2)
        >>> print(Layout.tiled(mesh, (10, 16), "float32", [[mesh.sub_axis("x")], []]))
        f32[{x}3/10, 16]
        """
        mesh = checked_mesh(mesh)
        sizes = checked_shape(shape)
        each = [_listed_axes(held, "axes of a dim") for held in _listed_axes(axes, "axes")]
        if len(each) != len(sizes):
            raise LayoutError(
                f"{len(each)} dims of axes for global shape {quoted(sizes)} of rank {len(sizes)}; "
                f"give one list of axes per dim ([] for a dim that is not split)"
            )
        dims: list[Dim] = []
        for size, held in zip(sizes, each, strict=True):
            digits = [Digit(mesh.checked(sub).size, sub) for sub in held]
            pieces = math.prod(d.radix for d in digits)
            dims.append(Dim((*digits, Digit(-(-size // pieces), None)), size))
        held_partial = _listed_axes(partial, "partial axes", any_order=True)
        op = ("sum" if reduction is None else reduction) if held_partial else None
        return cls(mesh, tuple(dims), dtypes.canonical(dtype), op, held_partial)

    @classmethod
    @name_arguments
    def from_spec(
        cls,
        spec: Any,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        *,
        unreduced: Sequence[str] = (),
        reduction: str = "sum",
    ) -> Layout:
        """From the axes of each dim, major to minor, as in `PartitionSpec`; a sub-axis is written `"y:(1)2"`.

        Dims past the end of the spec are not split. Uneven sizes are padded as in GSPMD.

        >>> str(Layout.from_spec([["x"], []], Mesh(x=4, y=2), (10, 16), "float32"))
        'f32[{x}3/10, 16]'
        """
        if isinstance(spec, Mesh):  # Calls as they were once: mesh, shape, dtype, spec.
            spec, mesh, shape, dtype = dtype, spec, mesh, shape
        mesh, sizes = checked_mesh(mesh), checked_shape(shape)
        if hasattr(spec, "partitions"):  # JAX's, which says what is partial, too.
            from reshard.types.notation.jax_sharding import read_spec

            raw = read_spec(spec, len(sizes))
            spec, unreduced = raw.dims, (*raw.unreduced, *unreduced)
            reduction = raw.reduction if raw.unreduced else reduction
        names = _axes_of_dims(spec, "spec")
        if len(names) > len(sizes):
            raise LayoutError(
                f"spec {quoted(list(spec))} has {len(names)} entries for global shape {quoted(sizes)} of rank "
                f"{len(sizes)}; give at most one entry per dim"
            )
        names += [()] * (len(sizes) - len(names))
        axes = [[mesh.sub_axis(name) for name in dim] for dim in names]
        partial = [mesh.sub_axis(name) for name in _listed_axes(unreduced, "unreduced", any_order=True)]
        return cls.tiled(mesh, sizes, dtype, axes, partial, reduction)

    @classmethod
    @name_arguments
    def from_shardy(cls, source: str, mesh: MeshLike | None, shape: Sequence[int], dtype: object) -> Layout:
        """From a Shardy sharding; `mesh` may be None if the text contains one.

        >>> str(Layout.from_shardy('[{"y"}, {"x":(1)2}]', Mesh(x=4, y=2), (16, 16), "float32"))
        'f32[{y}8, {x:(1)2}8]'
        """
        from reshard.types.notation import hlo as shardy
        from reshard.types.notation.sharding import place_sharding

        sizes, raw = checked_shape(shape), shardy.parse_shardy(source)
        with about_sharding(source, sizes):
            return cls._placed(place_sharding(raw, None if mesh is None else checked_mesh(mesh)), sizes, dtype)

    @classmethod
    @name_arguments
    def from_hlo(cls, source: str, shape: Sequence[int], dtype: object, *, num_devices: int = 1) -> Layout:
        """From an HLO sharding, on a mesh made for it, with axes d0, d1, ... unless the text names them.

        `num_devices` is needed only if the text does not give their number, as in `{replicated}`.

        >>> a = Layout.from_hlo("{devices=[2,1,4]<=[4,2]T(1,0)}", (16, 16, 16), "float32")
        >>> str(a.mesh), str(a)
        ('<d0=4, d1=2>', 'f32[{d1}8, 16, {d0}4]')
        """
        from reshard.types.notation import hlo

        sizes, raw = checked_shape(shape), hlo.parse_hlo(source)
        with about_sharding(source, sizes):
            return cls._placed(hlo.place_hlo(raw, len(sizes), num_devices), sizes, dtype)

    @classmethod
    @name_arguments
    def from_jax_text(cls, source: str, mesh: MeshLike, shape: Sequence[int], dtype: object) -> Layout:
        """From the text of a JAX `PartitionSpec`; dims past its end are not split.

        >>> str(Layout.from_jax_text("P(('x', 'y'), None)", Mesh(x=4, y=2), (16, 16), "float32"))
        'f32[{x}{y}2, 16]'
        """
        from reshard.types.notation import jax_sharding as partition_spec
        from reshard.types.notation.sharding import place_sharding

        sizes, raw = checked_shape(shape), partition_spec.parse_spec(source)
        with about_sharding(source, sizes):
            return cls._placed(place_sharding(raw.padded(len(sizes)), checked_mesh(mesh)), sizes, dtype)

    @classmethod
    @name_arguments
    def from_jax(cls, sharding: Any, shape: Sequence[int] | None = None, dtype: object = None) -> Layout:
        """From a `jax.sharding.NamedSharding`, on the devices of its mesh, with a shape and a dtype; or from an
        array or a `jax.ShapeDtypeStruct` that has one. Uneven sizes are padded as in XLA.

        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), PartitionSpec(("x", "y")))
        >>> print(Layout.from_jax(sharding, (16, 10), "float32"))
        f32[{x}{y}2, 10]
        """
        from reshard.types.notation import jax_sharding
        from reshard.types.notation.sharding import place_sharding

        if hasattr(sharding, "sharding"):
            shape = sharding.shape if shape is None else shape
            dtype = sharding.dtype if dtype is None else dtype
            sharding = sharding.sharding
        missing = " and ".join(what for what, given in (("shape", shape), ("dtype", dtype)) if given is None)
        if missing:
            raise LayoutError(
                f"{quoted(sharding)} comes without {missing}; write Layout.from_jax(sharding, shape, dtype), or give "
                f"an array that has a sharding"
            )
        sizes = checked_shape(shape)
        with about_sharding(str(sharding) if hasattr(sharding, "mesh") else quoted(sharding), sizes):
            raw = jax_sharding.read_sharding(sharding, len(sizes))
            return cls._placed(place_sharding(raw, jax_sharding.mesh_of(sharding.mesh)), sizes, dtype)

    @classmethod
    @name_arguments
    def from_dtensor(
        cls,
        placements: Sequence[Any],
        mesh: MeshLike | Sequence[int],
        shape: Sequence[int],
        dtype: object,
        *,
        names: Sequence[str] | None = None,
    ) -> Layout:
        """From PyTorch's DTensor placements, one for each mesh dim; torch itself is not needed.

        `mesh` is a mesh, such as a DeviceMesh, or a shape whose axes are called `names`, by default d0, d1, ...

        >>> str(Layout.from_dtensor(["S(0)", "R"], (2, 4), (16, 8), "float32"))
        'f32[{d0}8, 8]'
        """
        from reshard.types.notation import dtensor

        sizes = checked_shape(shape)
        is_mesh = isinstance(mesh, Mesh | str | Mapping) or hasattr(mesh, "mesh_dim_names")
        grid = checked_mesh(mesh) if is_mesh else dtensor.make_grid(cast("Any", mesh), names)
        placements = dtensor.parse_placements(placements) if isinstance(placements, str) else placements
        raw = dtensor.read_placements(placements, tuple(grid.axes.values()), sizes)
        axes = [SubAxis(name, 1, size) for name, size in grid.axes.items()]

        dims: list[Dim] = []
        for digits, pieces, size in zip(raw.dims, raw.pieces, sizes, strict=True):
            each = tuple(Digit(radix, None if at is None else axes[at]) for radix, at in digits)
            dims.append(Dim(each, size, pieces))
        return cls(grid, tuple(dims), dtypes.canonical(dtype), raw.reduction, tuple(axes[at] for at in raw.partial))

    @classmethod
    @name_arguments
    def from_scalapack(
        cls, desc: Sequence[int], grid: Sequence[int], dtype: object = "float64", *, order: str = "R"
    ) -> Layout:
        """From a ScaLAPACK descriptor on a grid of processes, numbered by rows ("R") or columns ("C").

        >>> str(Layout.from_scalapack([1, 0, 1000, 800, 64, 32, 0, 0, 512], (2, 3)))
        'f64[8{r}64/1000, 9{c}32/800]'
        """
        from reshard.types.notation import scalapack

        mesh, dims = scalapack.read_descriptor(desc, grid, order)

        def dim(size: int, block: int, name: str) -> Dim:
            axis = SubAxis(name, 1, mesh.axes[name])
            return fit_digits((Digit(axis.size, axis), Digit(block, None)), size)

        return cls(mesh, tuple(dim(*each) for each in dims), dtypes.canonical(dtype))

    @classmethod
    @name_arguments
    def from_owners(
        cls,
        owners: object,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        dim: int = 0,
        axes: Sequence[str] | None = None,
    ) -> Layout:
        """Each index of a dim on the device at the position that `owners` has for it; other dims are not split.

        `owners` is a list, or anything with the buffer protocol, such as a numpy array of ints. With `axes`, they are
        positions along these, major to minor, and the array is replicated along the others.

        >>> print(Layout.from_owners([0, 0, 2, 2, 0], Mesh(x=3), (5, 8), "float32"))
        f32[{x}(2@0,2@2,1@0), 8]
        """
        mesh = checked_mesh(mesh)
        names = tuple(mesh.axes) if axes is None else _listed_axes(axes, "axes")
        count = math.prod(mesh.sub_axis(name).size for name in names)
        return cls._in_pieces(Pieces.from_owners(owners, count), mesh, shape, dtype, dim, names)

    @classmethod
    @name_arguments
    def from_sizes(
        cls,
        sizes: object,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        dim: int = 0,
        axes: Sequence[str] | None = None,
    ) -> Layout:
        """A dim in pieces of these sizes, one for each coordinate along `axes`, major to minor; by default all axes.

        Several dims in pieces are `from_chunks`.

        >>> print(Layout.from_sizes([3, 5, 0, 2], Mesh(x=4, y=2), (10, 8), "float32", axes=["x"]))
        f32[{x}(3,5,0,2), 8]
        """
        items: Any = sizes
        if isinstance(items, list | tuple) and any(isinstance(each, list | tuple) for each in cast("list[Any]", items)):
            raise LayoutError(
                f"sizes {quoted(sizes)} are of several dims: give Layout.from_chunks(sizes, mesh, shape, dtype, axes)"
            )
        return cls._in_pieces(Pieces.from_sizes(sizes), mesh, shape, dtype, dim, axes)

    @classmethod
    @name_arguments
    def from_ranges(
        cls,
        offsets: object,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        dim: int = 0,
        axes: Sequence[str] | None = None,
    ) -> Layout:
        """As `from_sizes`, from where each piece starts and the last one ends: PETSc's `getOwnershipRanges()`.

        >>> print(Layout.from_ranges([0, 3, 8, 8, 10], Mesh(x=4), (10, 8), "float32"))
        f32[{x}(3,5,0,2), 8]
        """
        starts = read_offsets(offsets, "offsets")
        sizes = array("q", map(operator.sub, starts[1:], starts))
        return cls._in_pieces(Pieces.from_sizes(sizes), mesh, shape, dtype, dim, axes)

    @classmethod
    @name_arguments
    def from_chunks(
        cls, chunks: Sequence[Any], mesh: MeshLike, shape: object = None, dtype: object = None, axes: object = None
    ) -> Layout:
        """From Dask's chunks, the sizes along each dim, and the axes that hold each dim: a chunk for each coordinate.

        The chunks say `shape`, which may be left out: (chunks, mesh, dtype, axes).

        >>> print(Layout.from_chunks(((3, 3, 2, 2), (8,)), Mesh(x=4), "float32", ["x", None]))
        f32[{x}~10, 8]
        """
        if shape is not None and not isinstance(shape, list | tuple):
            shape, dtype, axes = None, shape, dtype if axes is None else axes
        mesh = checked_mesh(mesh)
        tables = [Pieces.from_sizes(sizes) for sizes in _listed_axes(chunks, "chunks", "Dask's, a tuple for each dim")]
        names = _axes_of_dims(axes, "axes")
        if len(names) != len(tables):
            raise LayoutError(f"chunks of {len(tables)} dims, axes of {len(names)}: give the axes of each, or None")
        given, chunked = cast("Sequence[int] | None", shape), tuple([each.size for each in tables])
        if given is not None and checked_shape(given) != chunked:
            raise LayoutError(f"chunks of global shape {chunked}, not {quoted(given)}; give theirs, or no shape")
        # A dim that no axis holds is whole on each device, whatever its chunks.
        tables = [each if held else Pieces([each.size], [0], 1) for each, held in zip(tables, names, strict=True)]
        dims = [_held_dim(mesh, held, pieces) for held, pieces in zip(names, tables, strict=True)]
        return cls(mesh, tuple(dims), dtypes.canonical(dtype))

    @classmethod
    @name_arguments
    def from_csr(cls, indptr: object, rows: Layout, dtype: object = None) -> Layout:
        """The nonzeros of a sparse matrix, in CSR's order, each where `rows`, a layout of the matrix, has its row.

        >>> rows = Layout.parse("f32[{x}2, 9]", Mesh(x=2))
        >>> print(Layout.from_csr([0, 3, 3, 4, 9], rows), Layout.from_csr([0, 3, 3, 4, 9], rows, "s32"))
        f32[{x}(3,6)] s32[{x}(3,6)]
        """
        offsets, dim = read_offsets(indptr, "indptr"), checked_rows(rows)
        if len(offsets) != dim.size + 1:
            raise LayoutError(
                f"indptr has {len(offsets)} offsets for {dim.size} rows, those of {rows}; give one more than rows "
                f"(exact cover)"
            )
        table = tabulate_pieces(dim)
        lengths = [offsets[start + n] - offsets[start] for start, n in zip(table.starts, table.lengths, strict=True)]
        return lay_nonzeros(rows, Pieces(lengths, table.numbers, table.count), dtype)

    @classmethod
    def _in_pieces(
        cls,
        pieces: Pieces,
        mesh: MeshLike,
        shape: Sequence[int],
        dtype: object,
        dim: object,
        axes: Sequence[str] | None = None,
    ) -> Layout:
        mesh, sizes = checked_mesh(mesh), checked_shape(shape)
        names = mesh.axes if axes is None else _listed_axes(axes, "axes")
        at = whole(dim, -len(sizes), len(sizes) - 1)
        if at is None:
            raise LayoutError(f"dim {quoted(dim)} of global shape {quoted(sizes)}: give the number of a dim")
        dims = [Dim((Digit(size, None),), size) for size in sizes]
        dims[at] = _held_dim(mesh, [*names], pieces)._replace(size=sizes[at])
        return cls(mesh, tuple(dims), dtypes.canonical(dtype))

    @name_arguments
    def to_jax(self, jax_mesh: Any) -> Any:
        """The `NamedSharding` of this layout on a jax mesh of the same devices.

        Raises `LayoutError` for a layout that no `NamedSharding` describes, `MeshError` for other devices.

        >>> from jax.sharding import AbstractMesh, PartitionSpec
        >>> layout = Layout.parse("f32[{x}{y}2, 10]", Mesh(x=4, y=2))
        >>> layout.to_jax(AbstractMesh((4, 2), ("x", "y"))).spec == PartitionSpec(("x", "y"), None)
        True
        """
        from reshard.types.notation import jax_sharding

        refuse_pieces(self, "a NamedSharding")
        held = [[d.axis for d in dim.digits if d.axis is not None] for dim in self.dims]
        if Layout.tiled(self.mesh, self.shape, self.dtype, held, self.partial, self.reduction) != self:
            raise LayoutError(
                f"{self}: a NamedSharding describes contiguous tiles only; reshape so that each local digit before a "
                f"held one is a dim of its own, and shard that array"
            )
        return jax_sharding.write_sharding(self.mesh, held, self.partial, self.reduction, jax_mesh)

    @classmethod
    def _placed(cls, placed: Placed, shape: Sequence[int], dtype: object) -> Layout:
        check_single_use(placed.mesh, [*(axis for dim in placed.dims for axis in dim), *placed.partial, *placed.idle])
        return cls.tiled(placed.mesh, shape, dtype, placed.dims, placed.partial, placed.reduction)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The true global shape."""
        return tuple(dim.size for dim in self.dims)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """The number of elements of the array, padding left out."""
        return math.prod(self.shape)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape, rounded up to whole pieces."""
        return tuple(dim.padded for dim in self.dims)

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of a device's tile, padding included; it is the same on all devices: the largest piece has room."""
        return tuple(dim.tile for dim in self.dims)

    def tile_shape_of(self, device: int) -> tuple[int, ...]:
        """The shape of a device's tile without padding, which lies at the end of each dim.

        >>> layout = Layout.parse("f32[2{x}2/9, 3]", Mesh(x=3))
        >>> layout.tile_shape, [layout.tile_shape_of(device) for device in layout.mesh.devices]
        ((4, 3), [(4, 3), (3, 3), (2, 3)])
        """
        position = self.mesh.position(device)
        return tuple(true_extent(dim, self.mesh, position) for dim in self.dims)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of a tile, padding included."""
        return self.nbytes(math.prod(self.tile_shape))

    @cached_property
    def even(self) -> bool:
        """Whether every dim is a numeral without padding."""
        return self.shape == self.padded_shape and not self.ragged

    @cached_property
    def ragged(self) -> bool:
        """Whether a dim is in pieces of any size, which no numeral says."""
        return any([dim.pieces is not None for dim in self.dims])

    @cached_property
    def held(self) -> tuple[SubAxis, ...]:
        """The sub-axes that hold digits, dim by dim, major to minor."""
        return tuple(d.axis for dim in self.dims for d in dim.digits if d.axis is not None)

    @name_arguments
    def tiles(self, array: Any, *, padded: bool = True) -> dict[int, Any]:
        """A whole array cut into this layout's tiles: a numpy array for each device id, padded with zeros or not.

        Of a sum or a product, the first summand is the array and the others change nothing; of a mean, a max or a min,
        each summand is the array. Raises `TileError` for an array of another shape or dtype.

        >>> import numpy as np
        >>> Layout.parse("int64[{x}3/5]", Mesh(x=2)).tiles(np.arange(5))
        {0: array([0, 1, 2]), 1: array([3, 4, 0])}
        """
        return import_module("reshard.runtime.numpy_tiles").cut_array(self, array, padded)

    @name_arguments
    def assemble(self, tiles: Mapping[int, Any]) -> Any:
        """The whole array of which these are the tiles, with or without padding, by device id; summands are combined.

        Raises `TileError` for tiles that are missing or do not fit, and for copies of a tile that differ.

        >>> import numpy as np
        >>> layout = Layout.parse("int64[{x}3/5]", Mesh(x=2))
        >>> layout.assemble({0: np.array([0, 1, 2]), 1: np.array([3, 4])})
        array([0, 1, 2, 3, 4])
        """
        return import_module("reshard.runtime.numpy_tiles").assemble_array(self, tiles)

    @name_arguments
    def with_local(self, dim: int, to: int | None = None) -> Layout:
        """This layout with a dim whole on every device: the axes that hold it hold more of dim `to`, after its own.

        By default `to` is a dim that no axis holds, then one whose tiles stay even, then the last one: slabs and
        pencils of an FFT. A dim in pieces that takes axes has even tiles then.

        >>> mesh = Mesh(x=4, y=2)
        >>> str(Layout.parse("f32[{x}4, {y}8, 16]", mesh).with_local(0))
        'f32[16, {y}8, {x}4]'
        >>> str(Layout.parse("f32[{x}4, {y}8, 16]", mesh).with_local(0, to=1))
        'f32[16, {y}{x}2, 16]'
        """
        rank = len(self.dims)
        numbers = [whole(each, -rank, rank - 1) for each in (dim, dim if to is None else to)]
        at, chosen = (0 if number is None else number % rank for number in numbers)
        if None in numbers or (to is not None and at == chosen):
            shown = quoted(dim) if to is None else f"{quoted(dim)} to {quoted(to)}"
            raise LayoutError(f"dim {shown} of {self}: give the numbers of two of its {rank} dims")
        axes = [d.axis for d in self.dims[at].digits if d.axis is not None]
        if not axes:
            return self
        # All even choices have one lower bound: a device keeps its share of the tile that it has.
        moved = {number: _hold_more(self.dims[number], axes) for number in range(rank) if number != at}
        if to is None and moved:

            def rate(number: int) -> tuple[bool, bool, int]:  # A dim that is whole keeps pencils pencils.
                free = all(digit.axis is None for digit in self.dims[number].digits)
                return free, moved[number].padded == moved[number].size, number

            chosen = max(moved, key=rate)
        dims = list(self.dims)
        dims[at] = Dim((Digit(dims[at].size, None),), dims[at].size)
        if moved:
            dims[chosen] = moved[chosen]
        return replace(self, dims=tuple(dims))

    def partial_as(self, other: Layout) -> bool:
        """Whether both are partial along the same sub-axes by the same operation, or neither is."""
        if not isinstance(other, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                f"{quoted(other)} is a {type(other).__name__}, not a Layout; give Layout.parse(text, mesh)"
            )
        return (self.reduction, self.partial) == (other.reduction, other.partial)

    def nbytes(self, elements: int) -> int:
        """Bytes of a number of elements of this layout's dtype."""
        try:
            return dtypes.nbytes(elements, self.dtype)
        except TypeError:
            raise LayoutError(f"{quoted(elements)} elements: give a whole number of at least 0") from None

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        # Hashes of text differ from process to process, so the cached hash must not be pickled.
        return Layout, (self.mesh, self.dims, self.dtype, self.reduction, self.partial)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.dtype, self.reduction, self.partial))

    @cached_property
    def _text(self) -> str:
        return self._write(str)

    def _write(self, write_pieces: Callable[[Pieces], str]) -> str:
        dims: list[str] = []
        for dim in self.dims:
            each = [str(d.radix) if d.axis is None else f"{{{self.mesh.spell(d.axis)}}}" for d in dim.digits]
            if dim.pieces is not None:
                each[-1] = write_pieces(dim.pieces)
            digits = "".join(each)
            fits = dim.pieces is not None or dim.padded == dim.size
            dims.append((digits or "1") if fits else f"{digits}/{dim.size}")
        axes = "".join(f"{{{self.mesh.spell(a)}}}" for a in self.partial)
        return f"{dtypes.short(self.dtype)}[{', '.join(dims)}]" + (f" + {self.reduction}{axes}" if axes else "")

    def __str__(self) -> str:
        return self._text

    def __format__(self, spec: str) -> str:
        """The text for people, as errors and pictures have it: long tables of pieces are shortened."""
        return format(self._write(format) if self.ragged else self._text, spec)

    def __repr__(self) -> str:
        return f"Layout.parse({f'{self}'!r}, {self.mesh!r})"


def checked_mesh(mesh: MeshLike) -> Mesh:
    """The mesh that is given, in any form that says one; raises `MeshError` for any other object."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str | Mapping) or hasattr(mesh, "axis_names") or hasattr(mesh, "mesh_dim_names"):
        return Mesh(cast("Any", mesh))
    raise MeshError(
        f"{quoted(mesh)} is a {type(mesh).__name__}, not a mesh; give Mesh(x=4, y=2), a dict of axes and sizes, or a "
        f"jax mesh"
    )


def checked_rows(rows: object) -> Dim:
    """Dim 0 of a layout of a matrix whose rows alone are split; raises `LayoutError` for anything else."""
    if not isinstance(rows, Layout):
        raise LayoutError(f"{quoted(rows)} is a {type(rows).__name__}, not a Layout: give that of a matrix by rows")
    if len(rows.dims) != 2 or rows.dims[1].tile != rows.shape[1] or rows.partial:
        raise LayoutError(f"{rows}: give a layout of two dims, of which dim 0 alone is split, as a matrix by rows")
    return rows.dims[0]


def lay_nonzeros(rows: Layout, pieces: Pieces, dtype: object = None) -> Layout:
    """A layout of one dim in these pieces, held by the axes that hold the rows of a matrix."""
    held = [digit for digit in rows.dims[0].digits if digit.axis is not None]
    dim = Dim((*held, Digit(pieces.largest, None)), pieces.size, pieces)
    return Layout(rows.mesh, (dim,), dtypes.canonical(rows.dtype if dtype is None else dtype))


def _hold_more(dim: Dim, axes: Sequence[SubAxis]) -> Dim:
    """The dim of which these axes hold more, after those that hold it: of its tiles if they divide, else of it all."""
    more = [Digit(axis.size, axis) for axis in axes]
    parts = math.prod(axis.size for axis in axes)
    held = max((number for number, digit in enumerate(dim.digits, 1) if digit.axis is not None), default=0)
    inner = math.prod(digit.radix for digit in dim.digits[held:])
    if dim.pieces is None and dim.padded == dim.size and inner % parts == 0:
        return Dim((*dim.digits[:held], *more, Digit(inner // parts, None)), dim.size)
    own = [digit for digit in dim.digits if digit.axis is not None]
    return Dim((*own, *more, Digit(-(-dim.size // (parts * math.prod(d.radix for d in own))), None)), dim.size)


def refuse_pieces(layout: Layout, what: str) -> None:
    """Raises `LayoutError` for a layout in pieces of any size, which `what` cannot say."""
    if layout.ragged:
        raise LayoutError(
            f"{layout} is in pieces of any size, and {what} is in equal tiles; first move it to a layout without "
            f"pieces (reshard.jax.move_tile in a shard_map, numpy's runtime and MPI do), or give that one"
        )


def _held_dim(mesh: Mesh, names: Sequence[str], pieces: Pieces) -> Dim:
    """A dim in pieces along some axes, major to minor."""
    held = [Digit(axis.size, axis) for axis in map(checked_mesh(mesh).sub_axis, names)]
    return Dim((*held, Digit(pieces.largest, None)), pieces.size, pieces)


def _axes_of_dims(given: Any, what: str) -> list[tuple[Any, ...]]:
    """The axes of each dim, of which one may be given by itself, and none as None."""
    return [
        (s,) if isinstance(s, str) else () if s is None else _listed_axes(s, f"{what} of a dim", _AXES)
        for s in _listed_axes(given, what, f"a list such as ['x', None], of at most {MOST_LISTED} items")
    ]


_AXES = "an axis, several, or None"
_LIST = f"a list of at most {MOST_LISTED} items"


def _listed_axes(given: Any, what: str, wanted: str = _LIST, any_order: bool = False) -> tuple[Any, ...]:
    """What a list holds, or a set if the order does not matter; raises `LayoutError` for anything else."""
    items = read_items(given, any_order)
    if items is None:
        raise LayoutError(f"{what} {quoted(given)}: give {wanted}")
    return items
