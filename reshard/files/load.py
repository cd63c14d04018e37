"""`load`: what is stored, in the layouts that are asked for, each stored byte read once.

comm=         a rank for each device: each reads its share, and they move what others need           mpi.loading
devices=      all devices in this process: tiles are copies of what it reads     runtime.on_files.host_load
shardings     jax.Arrays, in one process or several                              jax.loading
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from os import PathLike
from typing import Any, Literal

from reshard.errors import PlanError, name_arguments, quoted
from reshard.files.open import open as open_checkpoint
from reshard.files.plan_load import list_layout_targets, plan_load, read_targets
from reshard.names import Table
from reshard.plans.load_plan import LoadPlan
from reshard.plans.manifest import Manifest
from reshard.plans.stored import Checkpoint
from reshard.runtime.on_files.drivers import check_missing
from reshard.runtime.on_files.engine import CheckpointReader, ReadCounts, WantedTiles
from reshard.runtime.on_files.host_load import load_in_process
from reshard.runtime.on_files.reader_thread import ParallelReader
from reshard.runtime.on_files.sidecar import BlockChecks, find_checks
from reshard.show.load_progress import show_load_progress
from reshard.types.mesh import MeshLike
from reshard.types.whole import checked_flag


@name_arguments
def load(
    source: str | PathLike[str] | Checkpoint,
    targets: Any,
    *,
    mesh: MeshLike | None = None,
    comm: Any = None,
    devices: Sequence[int] | None = None,
    names: Table | str | None = None,
    sizes: Mapping[str, int] | None = None,
    sources: Mapping[str, str] | None = None,
    fills: Mapping[str, str] | None = None,
    rest: Literal["refuse", "skip"] = "refuse",
    budget: int | str | None = None,
    read_size: int | str = "1MiB",
    network: Any = None,
    wave: int | str | None = None,
    missing: Literal["refuse", "fill"] = "refuse",
    progress: bool = False,
    verify: bool = True,
    limit: float = 60.0,
    counts: ReadCounts | None = None,
) -> Any:
    """What is stored at a path, or in a checkpoint that has been opened, in the layouts that are asked for.

    `targets`, `mesh` and the options from `names` to `wave` are those of `plan_load`, which says how it is read. What
    comes back:

    - with `comm`, which all ranks of an MPI communicator call alike: {name: this rank's tile}, None where it has none.
      Rank 0 reads the metadata. Whatever goes wrong on one rank is the same error on all, and nothing is returned.
    - with `devices`, or neither: {name: {device: tile}}, all in this process.
    - for shardings: {name: jax.Array}, in the structure of `targets`, in one process or under `jax.distributed`.

    Tiles are C-ordered, of their layout's `tile_shape`, with zeros where that is padding.

    - `missing="fill"` reads chunks that a store does not have as its fill value; they are refused otherwise.
    - `progress` shows a bar, on rank 0, where `rich` is installed.
    - `verify` compares what is read with the checksums in `reshard.json`, or in the format, where there are any.
    - `limit` is how many seconds ranks wait for each other at each wave.
    - `counts` is filled with the bytes and calls that this process really read.

    Raises the errors of `plan_load`, `FileError` for files that cannot be read or have changed, and `ChecksumError`.

    >>> import os, tempfile
    >>> import numpy as np
    >>> path = os.path.join(tempfile.mkdtemp(), "w.npy")
    >>> np.save(path, np.arange(16, dtype="float32").reshape(4, 4))
    >>> load(path, {"w": "P(None, 'x')"}, mesh="x=2")["w"][1].tolist()
    [[2.0, 3.0], [6.0, 7.0], [10.0, 11.0], [14.0, 15.0]]
    """
    counts = ReadCounts() if counts is None else counts
    verify, progress = checked_flag(verify, "verify"), checked_flag(progress, "progress")
    if missing not in ("refuse", "fill"):
        raise PlanError(f'missing={quoted(missing)} is neither "refuse" nor "fill"')
    if comm is not None and devices is not None:
        raise PlanError("the devices of comm= are its ranks; leave out devices=")
    asking: dict[str, Any] = {"names": names, "sizes": sizes, "sources": sources, "fills": fills, "rest": rest}
    asking["mesh"] = mesh
    planning: dict[str, Any] = {"budget": budget, "read_size": read_size, "network": network, "wave": wave}

    def opened() -> Checkpoint:
        return source if isinstance(source, Checkpoint) else open_checkpoint(source)

    def planned(ckpt: Checkpoint) -> LoadPlan:
        plan = plan_load(ckpt, targets, devices=devices, **asking, **planning)
        # A store may leave out chunks: that is found before anything is read.
        check_missing(ckpt, {name for each in plan.waves for of in each.readings for name in of.tensors}, missing)
        return plan

    def described(ckpt: Checkpoint) -> str:
        asked = read_targets(ckpt, targets, **asking)
        moves = Manifest.of(asked.moves, sources=asked.sources, targets=asked.fills)
        return f"{moves.to_json()}\nload with {planning}, missing={missing!r}"

    def checks_of(ckpt: Checkpoint) -> BlockChecks | None:
        return find_checks(ckpt) if verify else None

    request = f"load {quoted(str(source.path if isinstance(source, Checkpoint) else source))}"
    if comm is not None:
        return import_module("reshard.mpi.loading").load_on_ranks(
            comm, request, opened, described, planned, checks_of, limit, missing, counts, progress
        )
    if list_layout_targets(targets, mesh) is not None:
        # Who names no devices has them all.
        devices = () if devices is None else devices
        ckpt = opened()
        plan = planned(ckpt)
        reader = CheckpointReader(ckpt, counts, checks_of(ckpt), missing)
        with show_load_progress(progress, sum(plan.read_bytes.values())) as shown:
            return load_in_process(plan, reader, shown)
    loading = import_module("reshard.jax.loading")
    with ExitStack() as closing:

        def prepare() -> Any:
            # Whatever fails here in one process of several fails in all.
            ckpt = opened()
            plan, asked = planned(ckpt), read_targets(ckpt, targets, **asking)
            checks = checks_of(ckpt)
            # Processes of one host share its cores.
            one = len({*asked.shardings.process_of.values()}) == 1
            threads = min(4 if one else 2, loading.count_cores())
            reader = closing.enter_context(ParallelReader(ckpt, counts, checks, missing, threads))
            shown = closing.enter_context(show_load_progress(progress, sum(plan.read_bytes.values())))

            def read(wanted: Sequence[WantedTiles]) -> None:
                reader.read_tiles(wanted)
                shown(counts.bytes)

            return loading.PreparedLoad(plan, asked.shardings, read, reader.close, checks)

        return loading.load_shardings(prepare, request)
