"""What a compiler makes of a plan: how much memory the program needs, and how long it takes; and the form that is best.

    list_forms_of       the forms that a plan may take under a budget: in parts, as an exchange, in smaller messages
    fit_compiled        the first of them that keeps to a budget as it is compiled
    choose_measured     the fastest of them, for `prefer="measured"`
    compile_form        asks the compiler, once for a form
    jit_move            the program that it is asked about, which is also the one that runs: it is compiled once

A model (`runtime/xla.peak_bytes`) says which forms are worth asking about, in which order. It decides alone where there
is nothing to compile for, on an abstract mesh, and for the smallest moves.

    bf16[256, 8, 256, {x}8] -> bf16[256, 8, 256, 64]    TPU v5p, budget 1.3 times source and target
        in 8 parts      the model says 1.24     the compiler 1.24       it is taken, after one compilation

Compilations run in a thread of their own, since the caller may be tracing, in a context of jax's, or inside XLA. The
pass inside XLA is off there. All processes of a move compile the same forms, so that they come to the same one.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard import hlo
from reshard.errors import BudgetError
from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.hlo.compiled_cycles import count_cycles
from reshard.jax import placement
from reshard.jax.running import weaken
from reshard.jax.xla_pass.program_peaks import CompilingThread
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.runtime import on_jax
from reshard.runtime.form_costs import estimate_form_seconds, time_compiled_wires
from reshard.synth.network import Network
from reshard.types.layout import Layout

ASKED = 8 << 10
"""Moves of fewer bytes of source and target on a device are not asked about: what a program needs for itself, such as
tables of indices, is as large."""
COUNTS = (8, 16, 32, 64, 4, 2)
"""The numbers of parts that are tried, the usual ones first."""
SHARES = (1 / 4, 1 / 16, 1 / 64)
"""How much of source and target the planner's messages may take beside them, in the forms that it cuts itself."""
MOST_ROUNDS = 64
"""The most launches of a form outside of loops: each takes the compiler some 50 ms."""
MANY_DEVICES, FEW_FORMS = 64, 6
"""A compilation for more devices takes several seconds: so many forms are tried at most."""

RUNS = 7
"""How often each form is run, where it is measured; the first run does not count."""
HERTZ = {r"v5( lite|e)": 1.5e9, r"v4": 1.05e9, r"v6": 1.75e9, "": 1.75e9}
"""The clock of a TensorCore by the kind of a TPU, v5p's where it is not known."""

_compiling = CompilingThread[str]("reshard-form")


class MoveEnds(NamedTuple):
    """Where a move starts and ends, and what else its program depends on beside the plan: whether the source is
    donated, whether dims and dtype stay, and whether it fills a part of an array that is there."""

    source: NamedSharding
    target: NamedSharding
    donate: bool = False
    plain: bool = True
    fills: bool = False


@dataclass(frozen=True)
class CompiledForm:
    """A plan as compiled: the bytes that a device holds at most, source and target included."""

    plan: Plan
    peak_bytes: int
    ends_bytes: int
    """Source and target alone, as they are laid out in memory."""
    cycles: int | None = None


def asks_compiler(ends: MoveEnds, plan: Plan) -> bool:
    """Whether a compiler can be asked what a plan needs, and it is worth it."""
    source, target = ends[:2]
    if not (isinstance(source.mesh, JaxMesh) and isinstance(target.mesh, JaxMesh)):
        return False
    if {source.memory_kind, target.memory_kind} - {None, "device", "unpinned_host"}:  # The last is a CPU's own.
        return False  # JAX moves it to or from there, beside the plan.
    if ends.fills and runs_on_stack(source, target):
        return False
    large = plan.source.tile_bytes + plan.target.tile_bytes >= ASKED
    return large and plan.source.even and plan.target.even


def runs_on_stack(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether a move is a program whose result is a stack of tiles on the source's mesh, since no jitted program can
    hold both ends: it has one order of devices, and one mesh if it is explicit."""
    if not (isinstance(source.mesh, JaxMesh) and isinstance(target.mesh, JaxMesh)):
        return False
    two_types = placement.has_explicit(source.mesh) and source.mesh.shape != target.mesh.shape
    return two_types or list(source.mesh.devices.flat) != list(target.mesh.devices.flat)


@lru_cache(maxsize=4096)
def jit_move(plan: Plan, ends: MoveEnds, weak: bool) -> Any:
    """The jitted move of an array by a plan; with `donate` it has the array's memory where the tiles are of one size.

    Beside the array it takes that of which it fills a part, and the scale of a cast. With `weak` the result has a weak
    type. Of a move that runs on a stack it is the part that needs memory.
    """
    source, target, donate, plain, _ = ends
    if runs_on_stack(source, target):
        return on_jax.compile_to_stack(plan.source, plan.steps, source.mesh)

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        there = on_jax.apply_plan(plan, source.mesh, x, into, scale)
        return weaken(there) if weak and plain else there

    # XLA can reuse a donated source's buffer for the result if both have one size.
    same = plan.source.tile_bytes == plan.target.tile_bytes and plan.source.even
    held: dict[str, Any] = {"in_shardings": source} if plain else {}
    return jax.jit(moved, out_shardings=target, donate_argnums=(0,) if donate and plain and same else (), **held)


def is_asking() -> bool:
    """Whether this thread compiles a form only to ask about it: the pass inside XLA leaves it as it is."""
    return _compiling.mark is not None


@lru_cache(maxsize=4096)
def compile_form(plan: Plan, ends: MoveEnds, cycles: bool = False) -> CompiledForm:
    """The plan of a move as it is compiled for the devices of its ends, which need not be there; with `cycles`, those
    that a TPU's compiler estimates, which takes as long again to read. What does not compile for want of memory fits
    no budget.
    """

    def shape_of(layout: Layout, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype), sharding=sharding)

    given: list[Any] = [shape_of(plan.source, ends.source)]
    if runs_on_stack(ends.source, ends.target):
        given += [None, {}]
    elif not ends.plain:
        given += [shape_of(plan.target, ends.target) if ends.fills else None, None]
    try:
        compiled = compile_alone(jit_move(plan, ends, False), *given)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompiledForm(plan, sys.maxsize, plan.source.tile_bytes + plan.target.tile_bytes, sys.maxsize)
    peak, laid_out = read_memory(compiled, next(iter(ends.source.device_set)).platform)
    return CompiledForm(plan, peak, laid_out, count_cycles(hlo.parse(compiled.as_text())) if cycles else None)


def compile_alone(program: Any, *given: Any) -> Any:
    """A jitted program, compiled in a thread of its own for what is given, arrays by their shapes and shardings."""
    wide = bool(jax.config.jax_enable_x64)

    def compile_it() -> Any:
        with jax.enable_x64(wide):
            return program.lower(*given).compile()

    return _compiling.run("compile", compile_it)


def read_memory(compiled: Any, platform: str) -> tuple[int, int]:
    """The bytes that a compiled program needs on a device at most, and those of its arguments and results alone."""
    memory = compiled.memory_analysis()
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # XLA:CPU leaves the temporaries out of its peak.
    return int(ends + memory.temp_size_in_bytes if platform == "cpu" else memory.peak_memory_in_bytes), int(ends)


def list_forms_of(
    plan: Plan, plan_within: Callable[[int], Plan], platform: str | None, network: Network | None = None
) -> list[Plan]:
    """The forms that a plan may take to need less memory, those first that are fastest as a rule, or on a TPU by the
    model of `form_costs` on a network.

    `plan_within` is the planner under a budget.
    """
    gpu, tpu = platform == "gpu", platform == "tpu"
    starts = [plan]
    direct = plan.view is None and plan.holding is None and plan.source.dtype == plan.target.dtype
    direct = direct and one_set(plan.source.mesh, plan.target.mesh) and plan.source.partial_as(plan.target)
    if direct and refine(plan.source, plan.target) is not None:
        starts.append(chain(plan.source, plan.target, [StepSpec("exchange", plan.target)], plan.donate))
    forms = [
        on_jax.in_parts(start, least=1, count=count, overlap=overlap, lanes=tpu)
        for overlap in ((True, False) if gpu else (False,))
        for start in starts
        for count in COUNTS
    ]
    floor, ends = plan.floor_bytes, plan.source.tile_bytes + plan.target.tile_bytes
    pieces = list[Plan]()
    for share in (*SHARES, 0.0):
        with suppress(BudgetError):
            pieces.append(plan_within(floor + int(share * ends)))
    # On XLA:CPU a loop over parts takes several times as long as messages in pieces.
    forms = [*pieces, *starts, *forms] if platform == "cpu" else [*forms, *pieces, *starts]
    rounds = (sum(step.launches // step.mode.parts for step in form.steps) for form in forms)
    short = [form for form, many in zip(forms, rounds, strict=True) if many <= MOST_ROUNDS]
    if tpu:
        short.sort(key=lambda form: estimate_form_seconds(form, network))
    return drop_repeats(short)[: FEW_FORMS if plan.source.mesh.size > MANY_DEVICES else None]


def drop_repeats(forms: Sequence[Plan]) -> list[Plan]:
    """The forms without those whose steps are those of one before, though they may be predicted other seconds."""
    first: dict[tuple[StepSpec, ...], Plan] = {}
    for form in forms:
        first.setdefault(tuple(step.spec for step in form.steps), form)
    return list(first.values())


def fit_compiled(preferred: Sequence[Plan], forms: Sequence[Plan], budget: int, ends: MoveEnds) -> Plan:
    """The first of the forms that keeps to a budget as it is compiled, the preferred ones before the others.

    Those that a model says do not fit are tried after all others, the smallest first. Raises `BudgetError` if none
    does, with the least that one of the forms needs.
    """
    padded, every = placement.platform_of(ends.target.mesh) == "tpu", drop_repeats([*preferred, *forms])
    judged = {form: on_jax.peak_bytes(form, padded) for form in every}
    for form in sorted(every, key=lambda form: max(budget, judged[form])):
        if compile_form(form, ends).peak_bytes <= budget:
            return form
    # A budget of that many bytes finds the same form: those that depend on the budget are left out.
    made = [compile_form(form, ends) for form in drop_repeats(forms)]
    least = min(made, key=lambda form: form.peak_bytes)
    source, target = forms[0].source, forms[0].target
    raise BudgetError(
        f"budget {budget} B is too small for {source} -> {target} (global {source.shape}, tiles {source.tile_shape} "
        f"and {target.tile_shape}, which take {least.ends_bytes} B as they are laid out in memory, mesh "
        f"{source.mesh}); of the {len(made)} forms of the move that were compiled, the smallest needs "
        f"{least.peak_bytes} B, which is the smallest budget that works",
        least.peak_bytes,
    )


@lru_cache(maxsize=4096)
def choose_measured(forms: tuple[Plan, ...], budget: int | None, ends: MoveEnds, network: Network | None) -> Plan:
    """The fastest of the forms that keep to the budget, remembered; the first is the one that a model would take.

    They run a few times, one after another, where the devices are here, in this process alone, and have the memory. A
    TPU's compiler says what a form takes where they are not: `estimated_cycles`, beside the seconds of the wires.
    Elsewhere the first one is kept.
    """
    made = [compile_form(form, ends) for form in forms]
    able = [form for form in made if budget is None or form.peak_bytes <= budget]
    devices, peak = list(ends.source.device_set), max(form.peak_bytes for form in able)
    here = jax.process_count() == 1 and all(device.local_hardware_id is not None for device in devices)
    if here and devices[0].platform == "cpu":
        here = 2 * len(devices) * peak <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    elif here:
        stats = [device.memory_stats() or {} for device in devices]
        here = all(peak <= each.get("bytes_limit", 0) - each.get("bytes_in_use", 0) for each in stats)
    if here:
        seconds = _compiling.run("time", lambda: _time_forms([form.plan for form in able], ends))
    elif devices[0].platform == "tpu":
        hertz = next((rate for kind, rate in HERTZ.items() if re.search(kind, str(devices[0].device_kind))))
        wires = [0.0 if network is None else time_compiled_wires(form.plan, network) for form in able]
        cycles = [compile_form(form.plan, ends, cycles=True).cycles or 0 for form in able]
        seconds = [first + count / hertz for first, count in zip(wires, cycles, strict=True)]
    else:
        return able[0].plan
    # Of forms that are as fast, the one that needs the least memory.
    fastest = 1.02 * min(seconds)
    quick = [form for form, taken in zip(able, seconds, strict=True) if taken <= fastest]
    return min(quick, key=lambda form: form.peak_bytes).plan


def _time_forms(forms: Sequence[Plan], ends: MoveEnds) -> list[float]:
    """The least seconds of each form, all run in turn; those that are far behind after two runs run no more."""
    shape, dtype = forms[0].source.shape, forms[0].source.dtype
    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=ends.source)
    runs, least = [jit_move(form, ends, False) for form in forms], [math.inf] * len(forms)
    x = None
    for turn in range(RUNS):
        for at, run in enumerate(runs):
            if turn > 2 and least[at] > 1.5 * min(least):
                continue
            x = make().block_until_ready() if x is None or x.is_deleted() else x
            began = time.perf_counter()
            run(x).block_until_ready()
            if turn:  # The first run of a program loads it.
                least[at] = min(least[at], time.perf_counter() - began)
    return least
