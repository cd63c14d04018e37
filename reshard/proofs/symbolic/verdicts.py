"""What makes a proof start anew: sizes that turn out not to vary."""

from __future__ import annotations


class Tied(Exception):
    """Local digits, as (dim, place), that an instruction cuts, so that their sizes stay fixed."""

    def __init__(self, places: frozenset[tuple[int, int]]) -> None:
        super().__init__(f"digits {sorted(places)} are cut")
        self.places = places
