NON_TEMPORAL: int
"""1 if the stores go past the caches, 0 where the compiler has none that do."""

def copy_runs(table: bytes, low: int, high: int, /) -> None:
    """Copies the bytes from `low` to `high` of the nest of runs that a table describes."""
