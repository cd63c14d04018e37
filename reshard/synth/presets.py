"""The figures of the preset networks, as plain data with citations; `network` makes the networks.

Bandwidths are the vendors' or the scaling book's peak figures, per device and direction. Latencies are rarely
published; each source says which are measured and which assumed.
"""

from __future__ import annotations

from typing import NamedTuple

_Link = tuple[float, float]
"""Latency in seconds, bandwidth in bytes/second."""


class TorusFigures(NamedTuple):
    """The arguments of a `Torus`: physical axes, the multiple at which one wraps, whether all must, devices a chip."""

    axes: int
    wrap: int
    cubes: bool = False
    cores: int = 1


class PresetFigures(NamedTuple):
    """The arguments of a `Network`: links inside a domain and between domains, its devices, the source, the torus."""

    name: str
    inner: _Link | None
    outer: _Link | None
    domain: int = 1
    source: str = ""
    torus: TorusFigures | None = None


_BOOK = "https://jax-ml.github.io/scaling-book"


def _tpu(
    name: str, one_way: float, dcn: float, chips: int, page: str, devices: int = 1, axes: int = 3
) -> PresetFigures:
    """A TPU: a ring on one torus axis sends through the links to both neighbours at once.

    In three dimensions, tori are made of cubes of 4x4x4; in two, an axis wraps around where it has all 16 chips of a
    pod's edge.
    """
    torus = TorusFigures(axes, 4, True, devices) if axes == 3 else TorusFigures(axes, 16, False, devices)
    source = (
        f"inner: ICI, {one_way:.3g} bytes/s one way per link ({_BOOK}/tpus, interconnect table) x 2 links: a ring with "
        "wraparound on one torus axis; without wraparound (axes below a full cube or pod edge) half of it. "
        f"outer: DCN, {dcn:.4g} bytes/s per chip ({_BOOK}/tpus), taken as one direction. "
        f"devices: {devices} per chip, with equal shares of its links; a faster link within a chip is not modelled. "
        f"domain: one pod of {chips} chips (https://docs.cloud.google.com/tpu/docs/{page}). "
        f"latency: ICI about 1 us a hop ({_BOOK}/sharding, note on ICI latency), taken for one hop; "
        "DCN has no published figure: assumed order of magnitude, 10 us"
    )
    links = (1e-6, 2 * one_way / devices), (1e-5, dcn / devices)
    return PresetFigures(name, *links, chips * devices, source=source, torus=torus)


def _gpu(name: str, nvlink: float, domain: int, generation: int, page: str) -> PresetFigures:
    """An NVIDIA GPU: NVLink through a switch inside a domain, one 400 Gb/s InfiniBand port per GPU outside."""
    source = (
        f"inner: NVLink {generation} through NVSwitch, 18 links, {nvlink:.3g} bytes/s in each direction ({_BOOK}/gpus, "
        "tables of NVLink generations and node types); peak, shared by all axes inside the domain; in practice an H100 "
        f"reaches about 370e9 (same page). outer: 400 Gb/s InfiniBand NDR, one ConnectX-7 port per GPU, 5e+10 bytes/s "
        f"in each direction (https://docs.nvidia.com/{page}). domain: GPUs of one NVLink domain. "
        "latency: one hop in NCCL's own model, ring with protocol LL: 0.6 us NVLink, 2.7 us network, the same "
        "for all generations (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, hwLatencies); "
        "the 6.6 us it adds once per collective call (baseLatencies) are left out"
    )
    return PresetFigures(name, (6e-7, nvlink), (2.7e-6, 400e9 / 8), domain, source=source)


def _ethernet(name: str, bits: float, latency: float, latency_source: str) -> PresetFigures:
    source = (
        f"outer: line rate of IEEE Std 802.3, {bits / 1e9:.0f} Gb/s full duplex, one port per device and no header "
        f"overhead: divide by the devices that share a port. latency: {latency_source}"
    )
    return PresetFigures(name, None, (latency, bits / 8), source=source)


_HOPPER = "dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"

FIGURES = (
    # Scaling book, part 2: 4.5e10 one way per link; DCN 6.25e9 per TPU; pod 16x16x16.
    _tpu("tpu-v4", 4.5e10, 6.25e9, 4096, "v4"),
    # Scaling book, part 2: 4.5e10 one way per link; DCN 3.125e9 (2 x 100 Gb/s per host of 8 chips); pod 16x16.
    _tpu("tpu-v5e", 4.5e10, 3.125e9, 256, "v5e", axes=2),
    # Scaling book, part 2: 9e10 one way per link; DCN 6.25e9 (Cloud TPU docs: 50 Gb/s per chip); pod of 8960.
    _tpu("tpu-v5p", 9e10, 6.25e9, 8960, "v5p"),
    # Scaling book, part 2: 9e10 one way per link; DCN 12.5e9 (Cloud TPU docs: 100 Gb/s per chip); pod 16x16.
    _tpu("tpu-v6e", 9e10, 12.5e9, 256, "v6e", axes=2),
    # Scaling book, part 2: 9e10 one way per link; DCN 12.5e9 per chip; pod of 9216 chips, 2 devices each.
    _tpu("tpu-7x", 9e10, 12.5e9, 9216, "tpu7x", devices=2),
    # Scaling book, GPUs: H100 450e9 GPU egress, 400e9 node egress of 8 GPUs; DGX H100: 8 ports of 400 Gb/s.
    _gpu("h100", 450e9, 8, 4, _HOPPER),
    # NVLink (Hopper) and network as H100.
    _gpu("h200", 450e9, 8, 4, _HOPPER),
    # Scaling book, GPUs: B200 900e9 GPU egress, 400e9 node egress of 8 GPUs; DGX B200: 14.4 TB/s, 8 ports.
    _gpu("b200", 900e9, 8, 5, "dgx/dgxb200-user-guide/introduction-to-dgxb200.html"),
    # Scaling book, GPUs: GB200 NVL72 900e9 GPU egress, 3600e9 node egress of 72; DGX GB200: 4 ports per 4 GPUs.
    _gpu("gb200-nvl72", 900e9, 72, 5, "dgx/dgxgb200-user-guide/hardware.html"),
    # Measured: memory copy on one core; half of an mpi4py ping-pong between two ranks.
    PresetFigures(
        "shm-mpi",
        inner=(1.3e-6, 5.2e9),
        outer=None,
        domain=1024,
        source=(
            "inner: copy bandwidth of one core, measured, 2-core x86 machine, into mapped memory. domain: assumed, one "
            "host of at most 1024 ranks; give an axis between hosts its own link. latency: measured, same machine, "
            "half a round trip of 1 byte (MPICH 5.0.2, mpi4py); ranks that share a core wait far longer"
        ),
    ),
    # 10GBASE line rate; Hurwitz and Feng, Hot Interconnects 11 (2003): 20 us between applications over TCP.
    _ethernet(
        "ethernet-10g",
        10e9,
        2e-5,
        "20 us end to end over TCP, J. Hurwitz and W. Feng, Initial End-to-End Performance Evaluation of 10-Gigabit "
        "Ethernet, Hot Interconnects 11, 2003 (http://www.hoti.org/archive/Hoti11_program/abstracts/24.html)",
    ),
    # 100GBASE line rate; the latency is assumed.
    _ethernet(
        "ethernet-100g",
        100e9,
        1e-5,
        "no single published figure: assumed order of magnitude, 10 us over TCP; RDMA is several times lower",
    ),
)
