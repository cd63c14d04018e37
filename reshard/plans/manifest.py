"""Manifests: what each side of a move believes that it moves, compared before any data do.

    trainer    w  (16, 8) float32  f32[{x}4, 8]  step 41        sha256 0f3c...
    server     w  (16, 8) float32  f32[{x}4, 8]  step 40        sha256 92aa...      refused: version 41 here, 40 there

Right bytes under a wrong name, of a wrong version or in another order are a wrong result that no layout can show. So
both sides write down the names, shapes, dtypes, layouts, views and versions of their arrays, in order, and compare the
hashes; where these differ, the entries say how.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple, cast

from reshard.errors import AgreementError, PlanError, VersionError, join_first, quoted
from reshard.plans.plan_data import flatten_tree
from reshard.types.json_fields import Fields, same_json
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.whole import MOST

FORMAT = 1
_MOST_SHOWN = 4
_MOST_WRITTEN = 64
_ENDS = ("source", "target")

Version = str | int | None
"""The version of an array's values, such as a training step."""


class Update(NamedTuple):
    """Which versions a move leads between, if it brings only what has changed since `base`.

    >>> held = Update(41, 42).check_held(41)
    >>> Update(42, 43).check_held(held)
    43
    >>> Update(42, 43).check_held(43)
    Traceback (most recent call last):
    reshard.errors.VersionError: the update from 42 to 43 was applied already; what is held has version 43
    """

    base: Version
    version: Version

    def check_held(self, held: Version, what: str = "what is held") -> Version:
        """The version after the update; raises `VersionError` unless `held` is what it starts from."""
        base, version = (checked_version(each, "an update") for each in self)
        if base is None or version is None or base == version:
            raise PlanError(f"{self} is no update; give two different versions, such as Update(41, 42)")
        if same_json(held, base):
            return version
        if same_json(held, version):
            raise VersionError(f"the update from {base} to {version} was applied already; {what} has version {held}")
        raise VersionError(
            f"the update from {base} to {version} starts from another version than {what} has, {held}; apply those "
            f"before it first, or move all of the array"
        )


class ManifestEntry(NamedTuple):
    """One array: its layout, or those of its source and target with their meshes, and a view between them, as text.

    `base` is the version from which a move of what has changed starts, None for a move of all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    view: str
    version: Version
    base: Version = None


@dataclass(frozen=True)
class Manifest:
    """The arrays of a tree, in their order.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("f32[{x}4, 8]", Mesh(x=4))
    >>> ours, theirs = Manifest.of({"w": layout}, version=41), Manifest.of({"w": layout}, version=40)
    >>> ours.sha256 == Manifest.of({"w": layout}, version=41).sha256 != theirs.sha256
    True
    >>> ours.check(theirs)
    Traceback (most recent call last):
    reshard.errors.AgreementError: 'w' has version 41 here and 40 there; nothing may move before both sides agree
    """

    entries: tuple[ManifestEntry, ...]

    def __post_init__(self) -> None:
        given = cast("Any", self.entries)
        if not isinstance(given, tuple) or not all(isinstance(one, ManifestEntry) for one in cast("Any", given)):
            raise PlanError(f"{quoted(self.entries)} are not entries of a manifest; make one with Manifest.of(tree)")

    @classmethod
    def of(
        cls,
        tree: object,
        version: Version | Update | Mapping[str, Version | Update] = None,
        *,
        sources: Mapping[str, str] | None = None,
        targets: Mapping[str, str] | None = None,
    ) -> Manifest:
        """The manifest of a tree of layouts, of (source, target) pairs, or of moves.

        `version` is that of all arrays, or of each by its name; an `Update` has the one that it starts from, too.
        `sources` and `targets` are the arrays that moves read and fill, as `reshard.plan_tree` takes them. Raises
        `PlanError` for any other tree.
        """
        reads, fills = (each or {} for each in (sources, targets))
        flat = {"": tree} if isinstance(tree, Layout) else flatten_tree(tree)
        entries: list[ManifestEntry] = []
        meshes: dict[Mesh, str] = {}
        for name, leaf in flat.items():
            one: object = version
            if isinstance(version, Mapping):
                by_name = cast("Mapping[str, object]", version)
                one = by_name.get(name, by_name.get(reads.get(name, name)))
            base, one = one if isinstance(one, Update) else (None, one)
            given = cast("Any", leaf)
            pair: list[Any] = list(given) if isinstance(leaf, tuple | list) else []
            ends = [leaf] if isinstance(leaf, Layout) else pair or [getattr(given, end, None) for end in _ENDS]
            if not all(isinstance(end, Layout) for end in ends):
                raise PlanError(f"{name!r}: {quoted(pair or given)} is neither a layout nor a (source, target) pair")
            for end in ends:  # Many arrays are on one mesh, whose devices may be thousands.
                if end.mesh not in meshes:
                    meshes[end.mesh] = write_mesh(end.mesh)
            layout = " -> ".join(f"{end} on {meshes[end.mesh]}" for end in ends)
            view = "" if getattr(given, "view", None) is None else str(given.view)
            if (holding := getattr(given, "holding", None)) is not None:
                # Thousands of runs may have changed: both sides compare their hash.
                stale = hashlib.sha256(holding.stale.to_json().encode()).hexdigest()[:16]
                have = f"{holding.layout} on {write_mesh(holding.layout.mesh)}"
                view += f", have {have}, changed {holding.stale} (sha256 {stale})"
            # A move of other arrays than those of its own name.
            view += f" of {quoted(reads[name])}" if name in reads else ""
            view += f" into {quoted(fills[name])}" if name in fills else ""
            versions = checked_version(one, repr(name)), checked_version(base, repr(name))
            entries.append(ManifestEntry(name, ends[0].shape, ends[0].dtype, layout, view, *versions))
        return cls(tuple(entries))

    @cached_property
    def sha256(self) -> str:
        """The hash of the manifest, in hexadecimal; equal in every process for equal manifests."""
        fields = [entry if entry.base is not None else entry[:-1] for entry in self.entries]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest as a JSON object, with its hash; `from_json` reads it back.

        >>> Manifest.from_json(Manifest(()).to_json()) == Manifest(())
        True
        """
        entries = [entry._asdict() for entry in self.entries]
        for entry in entries:
            if entry["base"] is None:
                del entry["base"]
        return json.dumps({"format": FORMAT, "entries": entries, "sha256": self.sha256})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads the text of `to_json`; raises `PlanError` if it is not one, or not the one that was hashed."""
        fields = Fields.read(text, "a manifest")
        number = fields.get("format", int)
        if number != FORMAT:
            raise PlanError(f"this manifest has format {quoted(number)}; this version reads {FORMAT}")
        entries: list[ManifestEntry] = []
        for entry in fields.objects("entries", "entry"):
            name, dtype, layout, view = (entry.get(key, str) for key in ("name", "dtype", "layout", "view"))
            version = entry.get("version", str, int, NoneType), entry.get("base", str, int, NoneType, default=None)
            entries.append(ManifestEntry(name, tuple(entry.listed("shape", int)), dtype, layout, view, *version))
        manifest = cls(tuple(entries))
        if fields.get("sha256", str) != manifest.sha256:
            raise PlanError("this manifest is not the one that was hashed; write it again with to_json()")
        return manifest

    def updated(self, update: Manifest) -> Manifest:
        """The manifest of what is held, this one, once an update has been applied to it; the arrays of the update that
        move as a whole, which have no base, get its version.

        Raises `VersionError` if one starts from another version than is held here, and `PlanError` for other arrays.

        >>> from reshard.types import Mesh
        >>> layout = Layout.parse("f32[{x}4, 8]", Mesh(x=4))
        >>> held = Manifest.of({"w": layout, "v": layout}, version=41)
        >>> held = held.updated(Manifest.of({"w": layout}, version=Update(41, 42)))
        >>> [entry.version for entry in held.entries]
        [42, 41]
        """
        versions = {entry.name: entry.version for entry in self.entries}
        for entry in update.entries:
            if entry.name not in versions:
                raise PlanError(f"{entry.name!r} is updated, and not held; held are {quoted(list(versions)[:4])}")
            if entry.base is not None:
                Update(entry.base, entry.version).check_held(versions[entry.name], repr(entry.name))
            versions[entry.name] = entry.version
        return Manifest(tuple(entry._replace(version=versions[entry.name]) for entry in self.entries))

    def check(self, other: Manifest, here: str = "here", there: str = "there") -> None:
        """Raises `AgreementError`, which says what differs, unless the other side's manifest is the same."""
        if not isinstance(other, Manifest):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"{quoted(other)} is not a Manifest; make one with Manifest.of(tree)")
        if self.sha256 != other.sha256:
            what = "; ".join(list_differences(self, other, here, there))
            raise AgreementError(f"{what}; nothing may move before both sides agree")


def list_differences(a: Manifest, b: Manifest, here: str = "here", there: str = "there") -> list[str]:
    """What differs between two manifests, at most a few things of each kind."""
    ours, theirs = ({entry.name: entry for entry in side.entries} for side in (a, b))
    lines: list[str] = []
    for some, others, where in ((ours, theirs, here), (theirs, ours, there)):
        if names := [name for name in some if name not in others]:
            lines.append(f"{join_first([*map(repr, names)], _MOST_SHOWN)} only {where}")
    changed = [
        f"{name!r} has {field} {mine} {here} and {other} {there}"
        for name in ours
        if name in theirs
        for field, mine, other in zip(ManifestEntry._fields, ours[name], theirs[name], strict=True)
        if mine != other
    ]
    lines += changed[:_MOST_SHOWN]
    if len(changed) > _MOST_SHOWN:
        lines.append(f"{len(changed) - _MOST_SHOWN} more differences")
    if not lines:  # The same entries, but in another order.
        order = enumerate(zip(ours, theirs, strict=True))
        lines += [f"the order differs: array {n} is {x!r} {here} and {y!r} {there}" for n, (x, y) in order if x != y][
            :1
        ]
    return lines


def write_mesh(mesh: Mesh) -> str:
    """A mesh as text, with the hash of its device ids where these are many: a thousand arrays, each on a thousand
    devices of its own, would be megabytes, which all ranks would write and hash before anything moves.

    >>> write_mesh(Mesh({"x": 2}, device_ids=[5, 3]))
    "Mesh({'x': 2}, device_ids=[5, 3])"
    >>> write_mesh(Mesh({"x": 1024}, device_ids=range(1024, 0, -1)))
    "Mesh({'x': 1024}, device_ids=[1024, 1023, 1022, 1021, ... 1] (sha256 909c63f2a937ef7c))"
    """
    ids = mesh.device_ids
    if ids is None or len(ids) <= _MOST_WRITTEN:
        return repr(mesh)
    numbers = array("q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    digest = hashlib.sha256(numbers).hexdigest()[:16]
    first = ", ".join(map(str, ids[:_MOST_SHOWN]))
    return f"Mesh({dict(mesh.axes)}, device_ids=[{first}, ... {ids[-1]}] (sha256 {digest}))"


def checked_version(version: object, whose: str) -> Version:
    """The version of an array's values; raises `PlanError` for what is not one."""
    if version is None or isinstance(version, str):
        return version
    if isinstance(version, int) and not isinstance(version, bool) and abs(version) <= MOST:
        return version
    raise PlanError(f"the version {quoted(version)} of {whose}: give text, an int of 64 bits, or None")
