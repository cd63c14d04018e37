"""Messages between GPUs: whether MPI takes their pointers, and which requests can go that way."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.errors import AgreementError
from reshard.runtime.on_mpi.gpu import gpu_moves
from reshard.runtime.on_mpi.gpu.gpu_moves import plan_between_gpus
from reshard.runtime.on_mpi.prepare import Request, read_options
from reshard.types import Layout, Mesh


def test_whether_mpi_takes_pointers_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_moves, "is_cuda_aware", lambda: False)
    monkeypatch.delenv(gpu_moves.CUDA_AWARE, raising=False)
    assert not gpu_moves.takes_pointers()
    for setting, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(gpu_moves.CUDA_AWARE, setting)
        assert gpu_moves.takes_pointers() == expected
    monkeypatch.setenv(gpu_moves.CUDA_AWARE, "maybe")
    with pytest.raises(AgreementError, match="give 1 if MPI takes pointers"):
        gpu_moves.takes_pointers()


def test_the_setting_of_crays_mpich(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    before = gpu_moves.is_cuda_aware()
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert gpu_moves.is_cuda_aware()
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "0")
    assert gpu_moves.is_cuda_aware() == before


def test_every_rank_is_sent_what_it_lacks():
    mesh = Mesh(x=3)
    source, target = Layout.parse("f32[{x}5, 9]", mesh), Layout.parse("f32[15, {x}3]", mesh)
    for rank in range(3):
        move = plan_between_gpus(Request.of_tile(source, target), rank, 4)
        assert move is not None
        assert not move.pulls
        assert sum(chunk.elements for chunk in move.messages.receives.chunks) == 2 * 5 * 3
        spare = rs.plan(source, target).peak_bytes - source.tile_bytes - target.tile_bytes
        assert 0 < move.messages.staging * 4 <= spare // 2


@pytest.mark.parametrize(
    ("before", "after", "tight"),
    [("[6, 6] + sum{x}", "[{x}3, 6]", False), ("[{x}3, 6]", "[6, {x}3]", True), ("[{x}3, 6]", "[6, 6]", False)],
)
def test_sums_and_budgets_without_room_to_pack_go_through_the_host(before: str, after: str, tight: bool):
    mesh = Mesh(x=2)
    source, target = (Layout.parse(f"f32{text}", mesh) for text in (before, after))
    budget = source.tile_bytes + target.tile_bytes if tight else None
    assert plan_between_gpus(Request.of_tile(source, target, read_options(budget)), 0, 4) is None
