"""Layouts of arrays whose dims have names: xarray's, and jaxtyping's annotations. Neither library is imported.

DataArray of dims (batch, feature), 16 x 8          {"batch": "x"}     f32[{x}4, 8] on <x=4>
Float32[Array, "batch feature"], batch=16, ...      {"batch": "x"}     f32[{x}4, 8] on <x=4>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import LayoutError, NotationError, did_you_mean, quoted
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

Axes = Mapping[str, str | Sequence[str]]
"""The mesh axes that split a dim, by the name of the dim; other dims are not split."""

_DIM = re.compile(r"(?:([A-Za-z_]\w*)=)?([0-9]{1,18})|([A-Za-z_]\w*)")


def from_xarray(array: Any, mesh: Mesh, axes: Axes) -> Layout:
    """The layout of an `xarray.DataArray` whose named dims are split along axes of the mesh.

    Raises `LayoutError` for what has no named dims, and for a dim that the array does not have.

    >>> class Measured:  # as an xarray.DataArray
    ...     dims, shape, dtype = ("time", "station"), (16, 10), "float32"
    >>> print(from_xarray(Measured, Mesh(x=4), {"time": "x"}))
    f32[{x}4, 10]
    """
    try:
        names, shape, dtype = list(map(str, array.dims)), array.shape, array.dtype
    except (AttributeError, TypeError):
        raise LayoutError(f"{quoted(array)} has no named dims; give an xarray.DataArray") from None
    return Layout.from_spec(_spec_of_dims(names, axes), mesh, shape, dtype)


def from_jaxtyping(annotation: Any, mesh: Mesh, axes: Axes, *, dtype: object = None, **sizes: int) -> Layout:
    """The layout of a jaxtyping annotation, such as `Float32[Array, "batch feature=8"]`, for these sizes of its dims.

    `dtype` is needed where the annotation allows several. Raises `NotationError` for dims that have no single size
    (`...`, `*name`, `#name`, expressions), `LayoutError` for a missing size or an unknown dim.

    >>> class Batch:  # as jaxtyping.Float32[jax.Array, "batch feature=8"]
    ...     dim_str, dtypes = "batch feature=8", ("float32",)
    >>> print(from_jaxtyping(Batch, Mesh(x=4), {"batch": "x"}, batch=16))
    f32[{x}4, 8]
    """
    try:
        text, dtypes = str(annotation.dim_str), list(map(str, annotation.dtypes))
    except (AttributeError, TypeError):
        raise LayoutError(
            f"{quoted(annotation)} is not an annotation of jaxtyping; give one such as Float32[Array, 'batch feature']"
        ) from None
    if dtype is None and len(dtypes) != 1:
        raise LayoutError(f"{quoted(annotation)} allows {len(dtypes)} dtypes; say which: dtype='float32'")
    dims: list[tuple[str, int]] = []
    for at, word in enumerate(text.split()):
        match = _DIM.fullmatch(word)
        if match is None:
            raise NotationError(f"annotation {text!r}: dim {word!r} has no single size; write a name, 8 or name=8")
        if match[2] is not None:
            dims.append((match[1] or str(at), int(match[2])))  # One that is only a size has its number as a name.
        elif match[3] in sizes:
            dims.append((match[3], sizes[match[3]]))
        else:
            raise LayoutError(f"annotation {text!r}: dim {word!r} has no size; give it: {word}=16")
    names = [name for name, _ in dims]
    if unknown := sorted(sizes.keys() - set(names)):
        raise _unknown_dim(unknown[0], names)
    element = dtypes[0] if dtype is None else dtype
    return Layout.from_spec(_spec_of_dims(names, axes), mesh, [size for _, size in dims], element)


def _spec_of_dims(names: Sequence[str], axes: Axes) -> list[str | Sequence[str] | None]:
    if not isinstance(axes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"axes {quoted(axes)}: give a dict of the name of a dim to its axes, such as {{'time': 'x'}}")
    for name in axes:
        if name not in names:
            raise _unknown_dim(name, names)
    return [axes.get(name) for name in names]


def _unknown_dim(name: str, names: Sequence[str]) -> LayoutError:
    return LayoutError(f"there is no dim {quoted(name)} among {', '.join(names) or 'none'}{did_you_mean(name, names)}")
