import numpy as np
from numpy.typing import NDArray

is_non_temporal: bool
"""Whether the stores go past the caches: not where the compiler has none that do."""

def copy_boxes(table: NDArray[np.int64], wanted: int, /) -> None:
    """Copies about so many bytes of what is left of a table's boxes, or all of it; the table says how far they are."""
