"""The topics of tiles on GPUs: on fake ones, and on those of this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, BudgetError, RankError, ReshardError, TileError
from reshard.mpi import redistribute
from reshard.runtime import Account
from reshard.runtime.on_mpi import gpu
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh
from tests.layouts import random_layout
from tests.mpi.cases import MESHES
from tests.mpi.fake_gpu import CupyLike, Driver, JaxLike, TorchLike, gpus
from tests.mpi.moving import MoveOptions, any_budget, check_refused, check_tile, given_tile, overwriting_budget, plan_of
from tests.mpi.worker import Case

KINDS = (TorchLike, CupyLike, JaxLike)
SHAPES = ((12, 10), (16,), (7, 5, 6), (9, 3), (8, 8, 4), (), (0, 3), (1, 2))
LIMIT = 8.0


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays of every library between layouts of every kind, in tiny and large chunks, on one node and on several."""
    choose = random.Random(comm.size)
    for nodes in sorted({1, comm.size}):
        team_of(comm, nodes=nodes)
        for at in range(90):
            mesh = choose.choice(MESHES[comm.size])
            shape = choose.choice(SHAPES)
            source = random_layout(choose, mesh, shape, "int32", at % 4 == 3)
            target = random_layout(choose, mesh, shape, "int32", False)
            kind, chunk, aware = KINDS[at % 3], choose.choice([8, 40, 200, gpu.CHUNK]), choose.random() < 0.4
            move = _random_options(choose, kind, source, target)
            name = f"{nodes} nodes, {at}: {kind.__name__}, {move}, {source} -> {target} on {mesh!r}, chunks of {chunk}"
            case = partial(_moved, comm, kind, source, target, move, chunk)
            yield f"{name}, {'aware' if aware else 'staged'}", partial(case, aware=aware)


def _random_options(choose: random.Random, kind: type, source: Layout, target: Layout) -> MoveOptions:
    out = kind is not JaxLike and choose.random() < 0.4
    donate = choose.random() < 0.4
    orders = ["C"] if kind is JaxLike else ["C", "F", "strided", "reversed"]
    budget = any_budget(choose, source, target) if choose.random() < 0.4 else None
    if donate and not out and (least := overwriting_budget(source, target)) is not None:
        return MoveOptions("natural", False, False, True, least, "C")
    return MoveOptions("natural", False, out, donate, budget, choose.choice(orders))


def _moved(
    comm: MPI.Intracomm,
    kind: Any,
    source: Layout,
    target: Layout,
    move: MoveOptions,
    chunk: int,
    dtype: Any = None,
    aware: bool = False,
) -> None:
    number = comm.rank % 2
    given = given_tile(source, comm.rank, dtype or source.dtype, move.order)
    plan, memory = plan_of(source, target, move), Account(source.dtype)
    with gpus() as driver, mock.patch.object(gpu, "CHUNK", chunk):
        tile = kind.of(driver, given, number)
        blank = given_tile(target, comm.rank, given.dtype, move.order) if move.out else None
        out = None if blank is None else kind.of(driver, np.full_like(blank, np.zeros((), blank.dtype)), number)
        options = {"budget": move.budget, "donate": move.donate, "memory": memory, "limit": LIMIT, "cuda_aware": aware}
        result: Any = redistribute(tile, source, target, comm, out=out, **options)
        assert type(result) is kind
        assert result.number == number
        assert out is None or result is out
        check_tile(target, comm.rank, np.array(result.shadow), comm)
        if not move.donate:
            assert np.array_equal(tile.shadow, given)
        _check_accounts(plan, memory, driver, source, move, chunk)
        if not plan.steps or (aware and _goes_by_pointers(plan, kind, given.itemsize)):
            assert driver.crossings == 0
        if not plan.steps:
            assert move.out or move.order != "C" or result is tile
        if plan.donate and target.tile_bytes:
            assert result.address == tile.address if kind is not JaxLike else tile.deleted


def _goes_by_pointers(plan: rs.Plan, kind: type, itemsize: int) -> bool:
    spare = plan.peak_bytes - plan.source.tile_bytes - plan.target.tile_bytes
    return kind is not JaxLike and plan.source.partial == plan.target.partial and spare >= 2 * itemsize


def _check_accounts(
    plan: rs.Plan, memory: Account, driver: Driver, source: Layout, move: MoveOptions, chunk: int
) -> None:
    """Asserts that pinned buffers are in the account, and that the account is within the plan's promise."""
    assert memory.peak_bytes <= plan.peak_bytes, f"{memory.peak_bytes} live: {plan}"
    assert driver.most_pinned <= 2 * chunk
    if driver.most_pinned:
        assert memory.peak_bytes >= driver.most_pinned + max(source.tile_bytes, plan.target.tile_bytes)
    assert memory.received_bytes <= plan.received_bytes


def dtypes(comm: MPI.Intracomm) -> Iterator[Case]:
    """Elements of every size, and dtypes that other packages add to numpy."""
    mesh = Mesh(x=comm.size)
    names = ["bool", "int8", "uint16", "float16", "bfloat16", "float64", "complex64", "complex128"]
    for at, name in enumerate(names):
        source = Layout.from_spec(mesh, (12, 8), name, [["x"]])
        target = Layout.from_spec(mesh, (12, 8), name, [[], ["x"]])
        for kind in KINDS:
            # Numpy's typestr of bfloat16 is that of any two bytes, so `__cuda_array_interface__` cannot express it.
            if (kind, name) != (CupyLike, "bfloat16"):
                move = MoveOptions(order="C" if kind is JaxLike else ("C", "strided")[at % 2])
                dtype = given_dtype(name)
                case = partial(_moved, comm, kind, source, target, move, 64, dtype)
                yield f"{name}, {kind.__name__}", case


def given_dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


ODD = 1


def refused(comm: MPI.Intracomm) -> Iterator[Case]:
    """One rank gives a wrong argument: the same error on all ranks, nothing has moved, and the next call works."""
    for name, odd in _odd().items():
        yield name, partial(_refused, comm, *odd)


def _odd() -> dict[str, tuple[type[ReshardError], str, Any]]:
    """For each case: the error on all ranks, a part of its text, and the odd rank's tile, `out` or option."""

    class Split(TorchLike):
        def __dlpack__(self) -> Any:
            raise BufferError("it lies on several devices")

    def of(kind: Any, content: np.ndarray, device: int = 0) -> Any:
        return lambda driver: kind.of(driver, content, device)

    tile, out = np.zeros((4, 8), "int32"), np.zeros((8, 4), "int32")
    return {
        "a tile on the host": (AgreementError, "tiles on GPUs", {"tile": lambda _: tile, "out": lambda _: out}),
        "out on the host": (TileError, "out is a ndarray", {"out": lambda _: out}),
        "out on another GPU": (TileError, "out is on GPU 1, the tile on GPU 0", {"out": of(TorchLike, out, 1)}),
        "out that is immutable": (TileError, "out is a JaxLike", {"out": of(JaxLike, out)}),
        "out of another shape": (TileError, "out has shape (2, 2)", {"out": of(TorchLike, out[:2, :2])}),
        "out of another dtype": (TileError, "out is int64", {"out": of(TorchLike, out.astype("int64"))}),
        "a tile of another shape": (TileError, "the tile has shape (3,)", {"tile": of(TorchLike, np.zeros(3, "i4"))}),
        "a tile of another dtype": (TileError, "the tile is float32", {"tile": of(CupyLike, tile.astype("f4"))}),
        "a tile on two GPUs": (TileError, "does not say where it lies", {"tile": of(Split, tile)}),
        "no GPU": (TileError, "driver cannot be loaded", {"no driver": True}),
        "no out": (AgreementError, "the ranks ask for different things", {"out": lambda _: None}),
        "a budget": (BudgetError, "the smallest that works", {"budget": 3}),
        "out that overlaps": (TileError, "out overlaps the tile", {"overlaps": True}),
        "a copy that fails": (RankError, "cuMemcpy", {"broken": True}),
    }


def _refused(comm: MPI.Intracomm, error: type[ReshardError], text: str, odd: dict[str, Any]) -> None:
    mesh = Mesh(x=2)
    source = Layout.from_spec(mesh, (8, 8), "int32", [["x"]])
    target = Layout.from_spec(mesh, (8, 8), "int32", [[], ["x"]])
    mine = odd if comm.rank == ODD else {}
    content = given_tile(source, comm.rank, "int32")
    with gpus() as driver:
        driver.broken = mine.get("broken", False)
        library = gpu.find_gpu.__wrapped__.__globals__["load_driver"]
        tile, out = TorchLike.of(driver, content), TorchLike.of(driver, np.full((8, 4), -5, "int32"))
        if "overlaps" in mine:
            out = TorchLike(driver, 0, tile.address, (8, 4), np.int32, (16, 4))
        given = {"tile": mine.get("tile", lambda _: tile)(driver), "out": mine.get("out", lambda _: out)(driver)}
        budget = mine.get("budget")
        absent = mock.Mock(side_effect=TileError("CUDA's driver cannot be loaded")) if "no driver" in mine else library
        call = partial(redistribute, **given, source=source, target=target, comm=comm, budget=budget, limit=LIMIT)
        with mock.patch("reshard.runtime.on_mpi.gpu.load_driver", absent):
            team = team_of(comm)
            check_refused(comm, error, call, text, alike=error is not RankError)
        assert (team_of(comm) is team) == (error is not RankError)  # Refused before the move, so nothing was torn down.
        assert np.array_equal(tile.shadow, content)
        assert (out.shadow == -5).all() or "overlaps" in mine
        assert not driver.current
    _moved(comm, TorchLike, source, target, MoveOptions(), 64)


def hardware(comm: MPI.Intracomm) -> Iterator[Case]:
    """The installed libraries, on GPU 0 of this machine."""
    for name, (to_gpu, to_host) in _libraries().items():
        for before, after in (("f32[{x}4, 6]", "f32[8, {x}3]"), ("f32[{x}3/5, 6]", "f32[5, 2{x}2/6]")):
            source, target = (Layout.parse(text, Mesh(x=2)) for text in (before, after))
            for chunk in (40, gpu.CHUNK):
                yield (
                    f"{name} {before} -> {after} {chunk}",
                    partial(_real, comm, to_gpu, to_host, source, target, chunk),
                )


def _libraries() -> dict[str, tuple[Any, Any]]:
    libraries: dict[str, tuple[Any, Any]] = {}
    for name in ("torch", "cupy", "jax"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        if name == "torch" and module.cuda.is_available():
            libraries[name] = lambda a, m=module: m.from_numpy(a).to("cuda:0"), lambda a: a.cpu().numpy()
        if name == "cupy" and module.cuda.runtime.getDeviceCount():
            libraries[name] = module.asarray, module.asnumpy
        if name == "jax" and module.default_backend() == "gpu":
            libraries[name] = lambda a, m=module: m.device_put(a, m.devices()[0]), np.asarray
    return libraries


def _real(comm: MPI.Intracomm, to_gpu: Any, to_host: Any, source: Layout, target: Layout, chunk: int) -> None:
    given = given_tile(source, comm.rank, "float32")
    tile = to_gpu(given)
    with mock.patch.object(gpu, "CHUNK", chunk):
        result: Any = redistribute(tile, source, target, comm, limit=LIMIT)
        transposed = redistribute(to_gpu(np.ascontiguousarray(given.T)).T, source, target, comm, limit=LIMIT)
    assert type(result) is type(tile)
    for each in (result, transposed):
        check_tile(target, comm.rank, to_host(each), comm)
    assert np.array_equal(to_host(tile), given)
