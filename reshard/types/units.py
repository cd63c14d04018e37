"""Sizes, times and shapes as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from reshard.errors import ReshardError, quoted
from reshard.types.whole import MOST, written

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Reads a size in bytes: `4096`, `64MiB`, `0.5GiB`, `10 GB`. Fractions of a byte are dropped.

    >>> parse_bytes("64MiB"), parse_bytes("0.5 GiB"), parse_bytes("2kB")
    (67108864, 536870912, 2000)
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ReshardError(
            f"cannot read the size {quoted(text)}; write bytes, or a number with KiB, MiB, GiB, TiB (1024) or "
            f"kB, MB, GB, TB (1000), e.g. 64MiB"
        )
    number = match[1].replace("_", "")
    if len(number) > 40 or (size := int(Fraction(number) * unit)) > MOST:
        raise ReshardError(
            f"the size {quoted(text)} is above {MOST} bytes, or has more than 40 digits; give a real one"
        )
    return size


def parse_shape(text: str) -> tuple[int, ...]:
    """Reads a global shape: `16,16,16`, `16x16x16` or `(16, 16, 16)`. Empty text is a scalar's shape.

    >>> parse_shape("16,16,16"), parse_shape("(8, )"), parse_shape("")
    ((16, 16, 16), (8,), ())
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ReshardError(f"cannot read the shape {quoted(text)}; write text, e.g. 16,16,16")
    body = text.strip()
    if body[:1] + body[-1:] in ("()", "[]"):
        body = body[1:-1]
    parts = [part.strip() for part in re.split(r"[,x]", body)]
    if parts[-1] == "":
        parts.pop()
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ReshardError(f"cannot read the shape {quoted(text)}; write whole numbers of at least 0, e.g. 16,16,16")
    sizes = [written(part) for part in parts]
    if None in sizes:
        raise ReshardError(f"the shape {quoted(text)} has a size above {MOST}; give the size of a real array")
    return tuple(size for size in sizes if size is not None)


def bytes_text(count: int) -> str:
    """Bytes with a binary unit, such as `64.0 MiB`; exact below 10 KiB.

    >>> bytes_text(96), bytes_text(6144), bytes_text(64 << 20)
    ('96 B', '6144 B', '64.0 MiB')
    """
    if count < 10240:
        return f"{count} B"
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    return f"{value:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time with a unit, to three digits.

    >>> seconds_text(0), seconds_text(1.25e-5), seconds_text(0.5), seconds_text(72)
    ('0 s', '12.5 us', '500 ms', '72.0 s')
    """
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1f} s"


def shape_text(shape: Sequence[int]) -> str:
    """A shape such as `16 x 4`.

    >>> shape_text((16, 4)), shape_text(())
    ('16 x 4', 'a scalar')
    """
    return " x ".join(map(str, shape)) or "a scalar"


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural where needed.

    >>> counted(1, "device"), counted(8, "device"), counted(2, "launch")
    ('1 device', '8 devices', '2 launches')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def listed(words: Sequence[str]) -> str:
    """Words joined by commas and a final `and`.

    >>> listed(["x"]), listed(["x", "y", "z"])
    ('x', 'x, y and z')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
