"""Element types: their names in every notation, and their sizes in bits.

The canonical name is numpy's or ml_dtypes' (`float32`, `bfloat16`, `float8_e4m3fn`, `int4`), so that
`numpy.dtype(layout.dtype)` works. The short name is HLO's (`f32`), which text uses.
"""

from __future__ import annotations

from reshard.errors import LayoutError, did_you_mean, quoted

_TABLE: tuple[tuple[str, str, int], ...] = (
    ("bool", "pred", 8),
    ("int2", "s2", 2),
    ("int4", "s4", 4),
    ("int8", "s8", 8),
    ("int16", "s16", 16),
    ("int32", "s32", 32),
    ("int64", "s64", 64),
    ("uint2", "u2", 2),
    ("uint4", "u4", 4),
    ("uint8", "u8", 8),
    ("uint16", "u16", 16),
    ("uint32", "u32", 32),
    ("uint64", "u64", 64),
    ("float4_e2m1fn", "f4e2m1fn", 4),
    ("float8_e3m4", "f8e3m4", 8),
    ("float8_e4m3", "f8e4m3", 8),
    ("float8_e4m3b11fnuz", "f8e4m3b11fnuz", 8),
    ("float8_e4m3fn", "f8e4m3fn", 8),
    ("float8_e4m3fnuz", "f8e4m3fnuz", 8),
    ("float8_e5m2", "f8e5m2", 8),
    ("float8_e5m2fnuz", "f8e5m2fnuz", 8),
    ("float8_e8m0fnu", "f8e8m0fnu", 8),
    ("float16", "f16", 16),
    ("bfloat16", "bf16", 16),
    ("float32", "f32", 32),
    ("float64", "f64", 64),
    ("complex64", "c64", 64),
    ("complex128", "c128", 128),
)
_SHORT = {name: short for name, short, _ in _TABLE}
NAMES = tuple(_SHORT)
"""All canonical names."""

_BITS = {name: bits for name, _, bits in _TABLE}
_ALIASES = {
    **{name: name for name in _SHORT},
    **{short: name for name, short, _ in _TABLE},
    **{f"i{short[1:]}": name for name, short, _ in _TABLE if name.startswith("int")},
    "f8e4m3": "float8_e4m3",
    "half": "float16",
    "single": "float32",
    "double": "float64",
    "float": "float64",
    "int": "int64",
    "complex": "complex128",
}


_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_NUMPY = {
    f"{kind}{size}": f"{name}{8 * size}"
    for kind, name in _KINDS.items()
    for size in (1, 2, 4, 8, 16)
    if f"{name}{8 * size}" in _ALIASES
}
"""What numpy's codes mean, which count bytes where HLO's names count bits."""


def canonical(dtype: object) -> str:
    """The canonical name of a dtype given as a name, a numpy dtype, a scalar class or a dtype of torch.

    Names are numpy's and HLO's, whose numbers are bits. numpy's codes, whose numbers are bytes, are read after a byte
    order, which says that they are codes; the order itself does not matter, since a layout has none.

    >>> canonical("f32"), canonical("bf16"), canonical("i4"), canonical("<i4")
    ('float32', 'bfloat16', 'int4', 'int32')
    """
    if isinstance(dtype, str):
        name = dtype
    else:
        given = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        name = given if isinstance(given, str) else quoted(dtype).removeprefix("torch.")
    code = _NUMPY.get(name[1:]) if name[:1] in ("<", ">", "=") else None
    try:
        return _ALIASES[name if code is None else code]
    except KeyError:
        candidates = ""
        if name in _NUMPY:
            # What it may stand for: numpy's codes and HLO's names both begin so.
            in_bits = ", ".join(spelled for _, spelled, _ in _TABLE if spelled.startswith(f"{name}e"))
            or_bits = f", or one of HLO's {name[1:]} bits ({in_bits})" if in_bits else ""
            candidates = f"numpy's code for {_NUMPY[name]} ('<{name}'){or_bits}; "
        same = name.strip().lower()
        likely = did_you_mean(same, [same] if same in _ALIASES else _SHORT)
        raise LayoutError(
            f"unknown dtype {quoted(name)}: {candidates}use a numpy name (float32), an HLO name (f32) or an "
            f"ml_dtypes name (bfloat16, float8_e4m3fn, int4){likely}"
        ) from None


def short(name: str) -> str:
    """HLO's name of a canonical dtype.

    >>> short("float32"), short("bool"), short("float8_e4m3fn")
    ('f32', 'pred', 'f8e4m3fn')
    """
    return _SHORT[name]


def bits(name: str) -> int:
    """Bits of one element of a canonical dtype.

    >>> bits("float32"), bits("int4")
    (32, 4)
    """
    return _BITS[name]


def nbytes(elements: int, name: str) -> int:
    """Bytes of a number of packed elements, rounded up to a whole byte.

    >>> nbytes(3, "int4")
    2
    """
    return (elements * _BITS[name] + 7) // 8
