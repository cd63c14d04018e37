"""Folders of tiles as `DistArray.save` writes them, made by numpy and json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from reshard.types import Layout


def write_tile(folder: Path, seat: int, tile: Any, save: str) -> None:
    """A tile of a save, with the line behind it that says which one it is."""
    with (folder / f"tile-{seat}-{save}.npy").open("wb") as file:
        np.save(file, tile, allow_pickle=False)
        file.write(f"\ntile {seat} of save {save}\n".encode())


def write_layout(folder: Path, layout: Layout, save: str) -> None:
    """What makes the tiles of a save an array."""
    ids = layout.mesh.device_ids
    head = {"format": 2, "layout": str(layout), "mesh": dict(layout.mesh.axes), "save": save}
    (folder / "layout.json").write_text(json.dumps(head | {"device_ids": None if ids is None else list(ids)}))
