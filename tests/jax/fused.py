"""Random trees that are fused and split: the arrays, the targets that name them, and what numpy makes of them.

A fused array is cut into boxes, or stacked, or interleaved; its parts may lie transposed and in other dtypes. What is
expected is made with numpy's slices, reshapes and transposes alone, of elements that are their own global indices.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from reshard.jax import Part, Target, redistribute
from tests.jax.oracle import assert_exact, mesh_of, specs

MESHES = [
    ({"a": 4, "b": 2}, range(8)),
    ({"a": 2, "b": 4}, range(8)),
    ({"a": 4}, range(4)),
    ({"s": 2, "t": 2}, range(4, 8)),
    ({"k": 8}, range(7, -1, -1)),
    ({"a": 3}, [6, 0, 3]),
    ({"t": 1}, [5]),
]
DTYPES = ("float32", "int32", "bfloat16", "float16")


class Case(NamedTuple):
    """Arrays by name, targets that name them, and for each target the values that numpy makes."""

    arrays: dict[str, Any]
    targets: dict[str, Target]
    values: dict[str, np.ndarray]


def choose_sharding(choose: random.Random, shape: tuple[int, ...], where: tuple[dict[str, int], Any]) -> NamedSharding:
    """A sharding on these devices that divides the shape."""
    sizes, devices = where
    mesh = mesh_of(sizes, order=list(devices))
    fitting: list[NamedSharding] = []
    for spec in specs(sizes, len(shape)):
        sharding = NamedSharding(mesh, spec)
        held = [e if isinstance(e, tuple) else (e,) if e else () for e in spec.partitions]
        counts = [int(np.prod([sizes[name] for name in names])) for names in held]
        if all(size % count == 0 for size, count in zip(shape, [*counts, *[1] * len(shape)], strict=False)):
            fitting.append(sharding)
    return choose.choice(fitting)


def cut_boxes(choose: random.Random, shape: tuple[int, ...], count: int) -> list[tuple[slice, ...]]:
    """The shape in boxes, cut in two again and again."""
    boxes = [tuple(slice(0, size) for size in shape)]
    for _ in range(count - 1):
        box = boxes.pop(choose.randrange(len(boxes)))
        dim = choose.randrange(len(shape))
        start, stop = box[dim].start, box[dim].stop
        if stop - start < 2:
            boxes.append(box)
            continue
        at = choose.randrange(start + 1, stop)
        if choose.random() < 0.7:  # Mostly where something divides, as weights are.
            at = start + (stop - start) // 2
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in (slice(start, at), slice(at, stop))]
    choose.shuffle(boxes)
    return boxes


def split_array(choose: random.Random, name: str, shape: tuple[int, int]) -> list[tuple[str, dict[str, Any], Any]]:
    """How arrays make up one of this shape: for each its name, its arguments as a `Part`, and its place, a function
    from the whole of numpy to a view of it."""
    rows, columns = shape
    kind = choose.choice(["boxes", "boxes", "stacked", "interleaved"])
    count = choose.choice([n for n in (2, 3, 4) if rows % n == 0])
    if kind == "boxes":
        listed = []
        for at, box in enumerate(cut_boxes(choose, shape, choose.randint(1, 5))):
            into = {dim: part for dim, part in enumerate(box) if part != slice(0, shape[dim])} or {0: slice(0, rows)}
            listed.append((f"{name}.{at}", {"into": into}, lambda whole, box=box: whole[box]))
        return listed
    if kind == "stacked":
        pattern = "r c -> (n r) c"
        place = lambda whole, at: whole.reshape(count, rows // count, columns)[at]  # noqa: E731
    else:
        pattern = "r c -> (r n) c"
        place = lambda whole, at: whole.reshape(rows // count, count, columns)[:, at]  # noqa: E731
    if choose.random() < 0.3:
        pattern, plain = pattern.replace("r c ->", "c r ->"), place
        place = lambda whole, at: plain(whole, at).T  # noqa: E731
    return [
        (f"{name}.{at}", {"view": pattern, "into": {"n": at}, "n": count}, lambda whole, at=at: place(whole, at))
        for at in range(count)
    ]


def draw_case(choose: random.Random, here: Any = None, there: Any = None) -> Case:
    """Some arrays fused, some of one split, some tied or moved as they are."""
    near, far = here or choose.choice(MESHES), there or choose.choice(MESHES)
    arrays: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    values: dict[str, np.ndarray] = {}
    for number in range(choose.randint(1, 3)):
        name, shape = f"w{number}", (choose.choice([24, 48]), choose.choice([8, 12, 24]))
        dtype = choose.choice(DTYPES)
        whole = np.arange(number, number + shape[0] * shape[1]).reshape(shape)
        parts = split_array(choose, name, shape)
        after = choose_sharding(choose, shape, far)
        if choose.random() < 0.5:
            made: list[Part] = []
            values[name] = np.zeros(shape, jnp.dtype(dtype))
            for part, given, place in parts:
                own = choose.choice(DTYPES) if choose.random() < 0.3 else dtype
                one = place(whole).astype(jnp.dtype(own))
                place(values[name])[...] = one.astype(jnp.dtype(dtype))
                where = near if here is not None or choose.random() < 0.9 else choose.choice(MESHES)
                arrays[part] = jax.device_put(one, choose_sharding(choose, one.shape, where))
                made.append(Part(part, **given))
            targets[name] = Target(after, shape=shape, parts=made, dtype=dtype)
            continue
        fused = whole.astype(jnp.dtype(dtype))
        arrays[name] = jax.device_put(fused, choose_sharding(choose, shape, near))
        for part, given, place in parts:
            back = dict(given, take=given["into"])
            del back["into"]
            if "view" in back:
                before, _, then = given["view"].partition(" -> ")
                back["view"] = f"{then} -> {before}"
            one = place(fused)
            targets[part] = Target(choose_sharding(choose, one.shape, far), source=name, **back)
            values[part] = one
        if choose.random() < 0.5:  # Tied: under two names, as it is.
            for tied in ("tied", "again"):
                targets[f"{name}.{tied}"] = Target(after, source=name)
                values[f"{name}.{tied}"] = fused
    return Case(arrays, targets, values)


def check_case(case: Case, **options: Any) -> None:
    """Moves the arrays and compares all results; donated arrays are deleted, unless they are results."""
    moved = redistribute(case.arrays, case.targets, **options)
    assert moved.keys() == case.targets.keys()
    for name, target in case.targets.items():
        assert_exact(moved[name], target.sharding, case.values[name])
        tied = name.replace("tied", "again")
        assert tied == name or moved[name] is moved[tied]
    for name, x in case.arrays.items():
        read = any(name in (target.source, *(part.source for part in target.parts)) for target in case.targets.values())
        assert x.is_deleted() == (bool(options.get("donate")) and read and not any(x is y for y in moved.values()))
