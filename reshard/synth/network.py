"""Networks: what it costs to send bytes along each mesh axis.

A `Link` is the alpha-beta model of one axis: a message of n bytes takes `latency + n / bandwidth` seconds. A `Network`
has the link of every axis of a mesh: `Network.preset("h100")` on `<dp=16, tp=8>` gives `tp` NVLink and `dp` InfiniBand.
Where its inner fabric is a torus, the axes of the mesh lie on physical ones (`torus`), and `wires` says what those
carry. `cost` says how the links of a step's axes add up to its time. The presets, with their sources, are at the end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from reshard.errors import NetworkError, did_you_mean, name_arguments, quoted, shortened
from reshard.synth.wires import Link as Link
from reshard.synth.wires import LinkLike, PhysicalAxis, Stretch, Torus, Wires, link_of
from reshard.types.input_files import read_input
from reshard.types.mesh import AXIS_NAME, Mesh
from reshard.types.whole import read_items, whole

OUTER_NAMES = ("dcn", "slice", "pod", "node", "host")
"""An axis whose name starts with one of these (in any case) crosses the outer network, whatever its size."""

LAUNCH_BYTES = 128 << 10
"""The cost of starting one collective, in received bytes, without a network: about 1 us at 100 GB/s."""

_MOST_BYTES = 1 << 20  # Of a network's file.
_LINK_KEYS = frozenset({"latency", "bandwidth"})
_TORUS_KEYS = frozenset(field.name for field in fields(Torus))
_KEYS = frozenset({"name", "inner", "outer", "domain", "axes", "source", "between", "torus"})


Links = Mapping[str, Link]
"""The link of every axis of a mesh, by name."""


@dataclass(frozen=True, init=False)
class Network:
    """A fast fabric of `domain` devices (`inner`), the fabric between such domains (`outer`), and single axes.

    `between` is the link from one set of devices to another, by default the outer one. `axes` overrides the link of
    an axis by name; `source` cites the figures. `torus` says how the inner fabric is wired, None for a switch; the
    inner bandwidth is then that of one physical axis. Immutable and hashable. Raises `NetworkError` for a network
    without any link, a bad domain, or a bad axis name.

    >>> two_hosts = Network("lab", inner=(2e-6, 4.5e11), outer=(9e-6, 5e10), domain=8)
    >>> [link.bandwidth for link in two_hosts.links(Mesh(dp=2, tp=8)).values()]
    [50000000000.0, 450000000000.0]
    """

    name: str
    inner: Link | None
    outer: Link | None
    domain: int
    axes: tuple[tuple[str, Link], ...]
    source: str
    between: Link | None
    torus: Torus | None

    @name_arguments
    def __init__(
        self,
        name: str,
        inner: LinkLike | None = None,
        outer: LinkLike | None = None,
        domain: int = 1,
        axes: Mapping[str, LinkLike] | tuple[tuple[str, LinkLike], ...] = (),
        source: str = "user-defined",
        between: LinkLike | None = None,
        torus: Torus | None = None,
    ) -> None:
        for value, what in ((name, "name"), (source, "source")):
            if not isinstance(value, str) or not value.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
                raise NetworkError(f"{what} {quoted(value)} of a network: give a text that is not blank")
        size = whole(domain, 1, 1 << 100)
        if size is None:
            raise NetworkError(
                f"domain {quoted(domain)}: give how many devices share the inner fabric, a whole number from 1 up"
            )
        own = _check_axes(axes)
        set_ = object.__setattr__
        set_(self, "name", name)
        set_(self, "inner", None if inner is None else link_of(inner, "inner"))
        set_(self, "outer", None if outer is None else link_of(outer, "outer"))
        set_(self, "domain", size)
        set_(self, "axes", tuple((axis, own[axis]) for axis in sorted(own)))
        set_(self, "source", source)
        set_(self, "between", None if between is None else link_of(between, "between"))
        set_(self, "torus", torus)
        if torus is not None and not isinstance(torus, Torus):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NetworkError(
                f"torus {quoted(torus)} of a network: give a Torus(axes=3, wrap=4), or None for a switch"
            )
        if torus is not None and self.inner is None:
            raise NetworkError(
                f"torus {quoted(torus)}: it is how inner links are wired, and there is none; give inner="
            )
        if self.inner is None and self.outer is None and not own:
            raise NetworkError(
                f"network {quoted(name)} has no link at all: give inner, outer or axes={{axis: Link(...)}}"
            )

    @property
    def crossing(self) -> Link:
        """The link from one set of devices to another: `between`, else the outer one, else the slowest there is.

        >>> Network("lab", inner=(2e-6, 4.5e11), outer=(9e-6, 5e10), domain=8).crossing.bandwidth
        50000000000.0
        """
        known = self.between or self.outer or self.inner
        return known or min((link for _, link in self.axes), key=lambda link: link.speed)

    def links(self, mesh: Mesh) -> Wires:
        """The link of every axis of a mesh, by name, and the wires that they lie on.

        1. An axis in `axes` has that link.
        2. An axis whose devices lie in one domain is inner: its size times the sizes of all more minor axes is at
           most `domain`, and its name starts with none of `OUTER_NAMES`.
        3. All others are outer. A network without an inner link uses the outer one for both.

        The inner axes lie on the physical axes of the torus, if there is one, in the order of the mesh.

        Raises `NetworkError` for an axis without a link, and for a mesh with other sizes than the torus.

        >>> links = Network.preset("tpu-v5p").links(Mesh(dcn=2, x=16, y=32))
        >>> {axis: f"{link.bandwidth:.3g}" for axis, link in links.items()}
        {'dcn': '6.25e+09', 'x': '1.8e+11', 'y': '1.8e+11'}
        """
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NetworkError(f"{quoted(mesh)} is not a Mesh; give Mesh(x=4, y=2)")
        return self._lay_wires(mesh)

    @lru_cache(maxsize=64)  # noqa: B019 (few networks, kept while used)
    def _lay_wires(self, mesh: Mesh) -> Wires:
        own = dict(self.axes)
        links: dict[str, Link] = {}
        span = 1
        for axis, size in reversed(list(mesh.axes.items())):
            span *= size
            links[axis] = own.get(axis) or self._fabric(axis, span, mesh)
        links = {axis: links[axis] for axis in mesh.axes}
        if self.torus is None or self.inner is None:
            return Wires.of(links, mesh)
        # The inner axes, one after another, lie on the physical axes of the torus.
        inner = [axis for axis, link in links.items() if axis not in own and link is self.inner]
        sizes = [mesh.axes[axis] for axis in inner]
        below = self.torus.under(sizes)
        physical = tuple(PhysicalAxis(size, wraps, self.inner) for size, wraps in below)
        alone = Wires.of({axis: link for axis, link in links.items() if axis not in inner}, mesh)
        return alone.joined(links, physical, dict(zip(inner, _list_stretches(sizes, below), strict=True)))

    def _fabric(self, axis: str, span: int, mesh: Mesh) -> Link:
        named = axis.lower().startswith(OUTER_NAMES)
        link = self.inner if self.inner and not named and span <= self.domain else self.outer
        if link is not None:
            return link
        if self.inner is None:
            why = f"it lists only {', '.join(n for n, _ in self.axes)}, and has neither an inner nor an outer link"
        elif named:
            why = f"its name starts with one of {', '.join(OUTER_NAMES)}, so it is outer, and there is no outer link"
        else:
            why = f"with the axes below it, it spans {span} devices, the inner domain {self.domain}, and no outer link"
        raise NetworkError(
            f"network {quoted(self.name)} has no link for axis {axis!r} of mesh {mesh}: {why}; "
            f"add one: network.with_axes({{{axis!r}: Link(latency, bandwidth)}})"
        )

    def with_axes(self, axes: Mapping[str, LinkLike]) -> Network:
        """This network with other links for some axes; raises `NetworkError` as the constructor does.

        >>> Network.preset("shm-mpi").with_axes({"node": (2e-5, 1.25e9)}).links(Mesh(node=2))["node"].latency
        2e-05
        """
        merged: dict[str, LinkLike] = {**dict(self.axes), **_check_axes(axes)}
        return Network(self.name, self.inner, self.outer, self.domain, merged, self.source, self.between, self.torus)

    @classmethod
    def of(cls, axes: Mapping[str, LinkLike], name: str = "user-defined", source: str = "user-defined") -> Network:
        """A network of named axes only, each a `Link` or (seconds, bytes/second).

        >>> Network.of({"x": (1e-6, 9e10), "dcn": Link(1e-5, 6.25e9)}).links(Mesh(dcn=2, x=4))["x"]
        Link(latency=1e-06, bandwidth=90000000000.0)
        """
        return cls(name, axes=axes, source=source)

    @classmethod
    @name_arguments
    def uniform(cls, latency: float, bandwidth: float) -> Network:
        """The same link (seconds, bytes/second) on every axis, whatever its name and size.

        >>> Network.uniform(0, 1e9).links(Mesh(pod=2, x=3))["pod"]
        Link(latency=0.0, bandwidth=1000000000.0)
        """
        return cls("uniform", outer=Link(latency, bandwidth))

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that `preset` takes."""
        return tuple(PRESETS)

    @classmethod
    def preset(cls, name: str) -> Network:
        """The network of that name in `PRESETS`; raises `NetworkError`, with all their names, for any other.

        >>> Network.preset("h100").domain
        8
        """
        network = PRESETS.get(_spell_preset(name)) if isinstance(name, str) else None  # pyright: ignore
        if network is None:
            raise NetworkError(f"unknown network {quoted(name)}: the presets are {', '.join(PRESETS)}")
        return network

    @classmethod
    def load(cls, path_or_name: str | Path) -> Network:
        """A preset by name, else the JSON file at that path; raises `NetworkError` if it is neither.

        >>> Network.load("ethernet-100g") is PRESETS["ethernet-100g"]
        True
        """
        if isinstance(path_or_name, str) and _spell_preset(path_or_name) in PRESETS:
            return PRESETS[_spell_preset(path_or_name)]
        shown = str(path_or_name) if isinstance(path_or_name, Path) else path_or_name
        try:
            if not isinstance(path_or_name, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError("a path is text")
            text = read_input(path_or_name, _MOST_BYTES).decode()
        except (OSError, ValueError, TypeError) as error:  # ValueError: not UTF-8, or a path with a null byte
            raise NetworkError(
                f"network {quoted(shown)} is not a preset and cannot be read as a file "
                f"({shortened(str(error), 80)}); give one of {', '.join(PRESETS)}, "
                f"or the path of a JSON file as Network.to_json() writes it{did_you_mean(shown, PRESETS)}"
            ) from None
        return _parse_network(text, f"network file {quoted(shown)}")

    def to_json(self) -> str:
        """This network as JSON text, seconds and bytes/second; `from_json` gives an equal one.

        >>> Network.from_json(Network.preset("h200").to_json()) == Network.preset("h200")
        True
        """
        links = {name: _link_data(getattr(self, name)) for name in ("inner", "outer", "between")}
        axes = {name: _link_data(link) for name, link in self.axes}
        torus = {} if self.torus is None else {"torus": asdict(self.torus)}
        shown = {"name": self.name, "domain": self.domain, "source": self.source, **links, "axes": axes, **torus}
        return json.dumps(shown, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Network:
        """Reads what `to_json` writes; all fields but `name` may be left out. Raises `NetworkError`.

        >>> Network.from_json('{"name": "lab", "outer": {"latency": 2e-5, "bandwidth": 1.25e9}}').outer
        Link(latency=2e-05, bandwidth=1250000000.0)
        """
        return _parse_network(text, "network JSON")

    def __str__(self) -> str:
        return self.name


def _check_axes(axes: Mapping[str, LinkLike] | tuple[tuple[str, LinkLike], ...]) -> dict[str, Link]:
    given = read_items(axes.items() if isinstance(axes, Mapping) else axes)
    try:
        own = cast("dict[object, object]", dict(given or ()))
        once = given is not None and len(own) == len(given)
    except (TypeError, ValueError):
        given, own, once = None, {}, False
    if given is None:
        raise NetworkError(f"axes {quoted(axes)}: give a mapping from axis name to Link")
    if not once:
        raise NetworkError(f"an axis occurs twice in {quoted(axes)}; give each axis one link")
    for name in own:
        if not isinstance(name, str) or not re.fullmatch(AXIS_NAME, name):
            raise NetworkError(
                f"bad axis name {quoted(name)} in a network: give the name of a mesh axis, without sub-axes"
            )
    return {str(name): link_of(link, f"axis {quoted(name)}") for name, link in own.items()}


def _list_stretches(sizes: Sequence[int], below: Sequence[tuple[int, bool]]) -> list[tuple[Stretch, ...]]:
    """Where each mesh axis, of these sizes, lies on the physical axes, both major to minor."""
    stretches: list[tuple[Stretch, ...]] = []
    for axis, size in enumerate(sizes):
        start = math.prod(sizes[axis + 1 :])
        parts: list[Stretch] = []
        for on, (length, _) in enumerate(below):
            first = math.prod(other for other, _ in below[on + 1 :])
            low, high = max(start, first), min(start * size, first * length)
            if low < high:
                parts.append(Stretch(low // start, high // start, on, low // first))
        stretches.append(tuple(parts))
    return stretches


def _spell_preset(name: str) -> str:
    # Vendors write H100, and the code of TPUs tpu_v5p.
    return name.lower().replace("_", "-")


def _parse_network(text: str, where: str) -> Network:
    try:
        data = cast("object", json.loads(text, object_pairs_hook=_without_repeats))
        fields = _check_object(data, "the outermost value", _KEYS, frozenset({"name"}))
        links = {
            name: None if fields.get(name) is None else _json_link(fields[name], name)
            for name in ("inner", "outer", "between")
        }
        torus: dict[str, Any] | None = None
        if fields.get("torus") is not None:
            torus = _check_object(fields["torus"], "torus", _TORUS_KEYS)
        return Network(
            name=cast("str", fields["name"]),
            domain=cast("int", fields.get("domain", 1)),
            axes={
                n: _json_link(v, f"axis {quoted(n)}") for n, v in _check_object(fields.get("axes", {}), "axes").items()
            },
            source=cast("str", fields.get("source", "user-defined")),
            torus=None if torus is None else Torus(**torus),
            **links,
        )
    except NetworkError as error:
        raise NetworkError(f"{where}: {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise NetworkError(f"{where} is not JSON ({shortened(str(error))}); write it with Network.to_json()") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise NetworkError(f"a key occurs twice in {quoted([key for key, _ in pairs])}; keep one of them")
    return fields


def _check_object(
    value: object, where: str, keys: frozenset[str] | None = None, required: frozenset[str] = frozenset()
) -> dict[str, object]:
    if not isinstance(value, dict):
        raise NetworkError(f"{where}: {str(value)[:60]!r} is not a JSON object; write it with Network.to_json()")
    fields = cast("dict[str, object]", value)
    if missing := sorted(required - fields.keys()):
        raise NetworkError(f"{where}: {', '.join(missing)} is missing; its keys are {quoted(sorted(fields))}")
    if keys is not None and (extra := sorted(fields.keys() - keys)):
        raise NetworkError(
            f"{where}: unknown key {shortened(', '.join(extra))}; the keys are {', '.join(sorted(keys))}"
        )
    return fields


def _json_link(value: object, what: str) -> LinkLike:
    fields = _check_object(value, what, _LINK_KEYS | {"shape", "issue"}, _LINK_KEYS)
    more = (fields.get("shape", "switch"), fields.get("issue"))
    given = 2 if fields.get("issue") is not None else int("shape" in fields)
    return cast("LinkLike", (fields["latency"], fields["bandwidth"], *more[:given]))


def _link_data(link: Link | None) -> dict[str, object] | None:
    """A link as JSON has it: a shape only where it is not a switch, what is issued only where it is given, so that
    older versions read the others, too."""
    if link is None:
        return None
    shape = {} if link.shape == "switch" else {"shape": link.shape}
    issue = {} if link.issue is None else {"issue": link.issue}
    return {"latency": link.latency, "bandwidth": link.bandwidth, **shape, **issue}


def launch_bytes(network: Network | str | None) -> int:
    """The cost of starting a collective, in bytes: what the network's links carry during their latency, at most."""
    if not isinstance(network, Network):
        return LAUNCH_BYTES
    links = [link for link in (network.inner, network.outer, *(link for _, link in network.axes)) if link is not None]
    return int(max(link.latency * link.bandwidth for link in links))


# The presets. Bandwidths are the vendors' or the scaling book's peak figures, per device and direction. Latencies are
# rarely published; each source says which are measured and which assumed.

_BOOK = "https://jax-ml.github.io/scaling-book"


def _tpu(name: str, one_way: float, dcn: float, chips: int, page: str, devices: int = 1, axes: int = 3) -> Network:
    """A TPU: a ring on one torus axis sends through the links to both neighbours at once.

    In three dimensions, tori are made of cubes of 4x4x4; in two, an axis wraps around where it has all 16 chips of a
    pod's edge.
    """
    torus = Torus(axes, 4, True, devices) if axes == 3 else Torus(axes, 16, False, devices)
    source = (
        f"inner: ICI, {one_way:.3g} bytes/s one way per link ({_BOOK}/tpus, interconnect table) x 2 links: a ring with "
        "wraparound on one torus axis; without wraparound (axes below a full cube or pod edge) half of it. "
        f"outer: DCN, {dcn:.4g} bytes/s per chip ({_BOOK}/tpus), taken as one direction. "
        f"devices: {devices} per chip, with equal shares of its links; a faster link within a chip is not modelled. "
        f"domain: one pod of {chips} chips (https://docs.cloud.google.com/tpu/docs/{page}). "
        f"latency: ICI about 1 us a hop ({_BOOK}/sharding, note on ICI latency), to the device that is furthest away; "
        "issuing a message has no published figure: assumed a twentieth of a hop, since those of one collective are "
        "under way together; DCN has no published figure: assumed order of magnitude, 10 us"
    )
    inner, outer = Link(1e-6, 2 * one_way / devices, issue=5e-8), Link(1e-5, dcn / devices)
    return Network(name, inner, outer, chips * devices, source=source, torus=torus)


def _gpu(name: str, nvlink: float, domain: int, generation: int, page: str) -> Network:
    """An NVIDIA GPU: NVLink through a switch inside a domain, one 400 Gb/s InfiniBand port per GPU outside."""
    source = (
        f"inner: NVLink {generation} through NVSwitch, 18 links, {nvlink:.3g} bytes/s in each direction ({_BOOK}/gpus, "
        "tables of NVLink generations and node types); peak, shared by all axes inside the domain; in practice an H100 "
        f"reaches about 370e9 (same page). outer: 400 Gb/s InfiniBand NDR, one ConnectX-7 port per GPU, 5e+10 bytes/s "
        f"in each direction (https://docs.nvidia.com/{page}). domain: GPUs of one NVLink domain. "
        "latency: one hop in NCCL's own model, ring with protocol LL: 0.6 us NVLink, 2.7 us network, the same "
        "for all generations (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, hwLatencies), and for "
        "each message, since issuing one has no published figure; the 6.6 us it adds once per collective call "
        "(baseLatencies) are left out"
    )
    return Network(name, (6e-7, nvlink), (2.7e-6, 400e9 / 8), domain, source=source)


def _ethernet(name: str, bits: float, latency: float, latency_source: str) -> Network:
    source = (
        f"outer: line rate of IEEE Std 802.3, {bits / 1e9:.0f} Gb/s full duplex, one port per device and no header "
        f"overhead: divide by the devices that share a port. latency: {latency_source}"
    )
    return Network(name, None, (latency, bits / 8), source=source)


_HOPPER = "dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"

_FIGURES = (
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
    Network(
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

PRESETS: Mapping[str, Network] = MappingProxyType({network.name: network for network in _FIGURES})
"""Known networks by name; `docs/explanation/networks.md` lists their figures, and each `source` cites them."""
