import numpy as np
from numpy.typing import NDArray

is_non_temporal: bool
"""Whether the stores go past the caches: not where the compiler has none that do."""

def copy_boxes(table: NDArray[np.int64], wanted: int, /) -> None:
    """Copies about so many bytes of what is left of a table's boxes, or all of it; the table says how far they are."""

def prepare_exchange(numbers: bytes, kind: type, code: str, /) -> object:
    """What `exchange` needs of a small move; `kind` and `code` are the type and the format of its arrays."""

def exchange(prepared: object, tile: object, result: object, number: int, synced: int, logged: int, /) -> int:
    """A small move: 1 once the result is complete, 2 if others have not posted so far, 0 if nothing has been done."""
