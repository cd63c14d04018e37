"""One program, compiled plain and with the pass; on CPU also run. Its result is one row of plain data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend import xla

import reshard.jax
from benchmarks.real_programs import PROGRAMS
from benchmarks.real_programs.base import BY_HAND_SUFFIX, Case, Scale
from benchmarks.real_programs.counting import received_bytes
from reshard import hlo
from reshard.doctor import Place, examine
from reshard.jax.program_report import optimized_text
from reshard.jax.request import options_on
from reshard.jax.xla_pass.measured_programs import read_executable
from reshard.synth.options import PlanOptions

_jax: Any = jax
HERE = Path(__file__).resolve().parents[1]
SUMS: dict[str, dict[str, Any]] = {"pass": {}, "in any order": {"sums": "any order"}}
"""How the pass may add up, and the options that say so."""
PEAK_SLACK = 1.01
"""Alignment, what an allocator leaves between buffers, and the tables of offsets that CPU counts."""


def measured(name: str, target: str, dump: Path | None, times: int = 1) -> dict[str, Any]:
    """The row of a program, each compiled so many times; raises what building or compiling it raises."""
    one = PROGRAMS[name]
    case = one.build(Scale(devices(target), target != "cpu"))
    warm_up()
    plain, plain_seconds = _compiled(case, times)
    with reshard.jax.enabled() as log:
        (ours, cold_seconds), (_, cached_seconds) = (_compiled(case, 1) for _ in range(2))  # from one line, as a user's
    del log.reports[len(log.reports) // 2 :]
    texts = [optimized_text(compiled) for compiled in (plain, ours)]
    if dump:
        for text, kind in zip(texts, ("plain", "pass"), strict=True):
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name}.{target}.{kind}.hlo").write_text(text)
    doctor, changed = _doctor(texts[0], target), any(report.changed for report in log.reports)
    places = [place for report in log.reports for place in report.places]
    row = {
        "program": name, "library": one.library, "about": one.about, "target": target, "devices": len(devices(target)),
        "plain": {**_figures(plain, texts[0]), "seconds": plain_seconds},
        "pass": {**_figures(ours, texts[1]), "seconds": cold_seconds, "cached_seconds": cached_seconds},
        **doctor,
        "still_not_needed": _doctor(texts[1], target)["not_needed"] if changed else doctor["not_needed"],
        "fates": [one.to_pass_dict() | {"plans": [str(plan) for plan in one.plans]} for one in places],
        "pass_seconds": round(sum(report.seconds for report in log.reports), 3),
        "left": dict(Counter(place.why_left for place in places if place.why_left)),
        "why": [report.why for report in log.reports if report.why],
    }  # fmt: skip
    if target == "cpu":
        row |= _compared(case, plain, ours)
        if row["pass"]["peak"] > PEAK_SLACK * row["plain"]["peak"]:
            row["plain"]["handed_back"] = peak_handed_back(lambda: _compiled(case, 1)[0])
    return row | {"violations": violations(row)}


def measure_by_hand(name: str, target: str) -> dict[str, Any]:
    """What a program receives as its users write it, plain and with the pass, beside the one written by hand."""
    scale = Scale(devices(target), target != "cpu")
    written, by_hand = (PROGRAMS[one].build(scale) for one in (name, name + BY_HAND_SUFFIX))
    plain, by_hand_compiled = (_compiled(case, 1)[0] for case in (written, by_hand))
    received = {"plain": received_bytes(optimized_text(plain))}
    difference = 0.0
    for kind, options in SUMS.items():
        with reshard.jax.enabled(**options):
            ours = _compiled(written, 1)[0]
        received[kind] = received_bytes(optimized_text(ours))
        if target == "cpu":
            difference = max(difference, _compared(written, by_hand_compiled, ours)["difference"])
    received["by hand"] = received_bytes(optimized_text(by_hand_compiled))
    return {"program": name, "target": target, "received": received, "difference": difference}


def peak_handed_back(compile_it: Callable[[], Any]) -> int:
    """The peak of a program on CPU whose module is given back to XLA as it was: it is in another order by then."""
    name = "benchmark-hands-back"
    xla.register_hlo_module_transformation(bytes, name=name, stage=xla.PipelineStage.PRE_SCHEDULER, platforms=["cpu"])
    try:
        return read_executable(compile_it().runtime_executable()).peak_bytes
    finally:
        xla.clear_hlo_module_transformation(name)


def devices(target: str) -> tuple[Any, ...]:
    """The devices of a target; none of those compiled for ahead of time need exist."""
    match target:
        case "cpu":
            return tuple(_jax.devices("cpu"))
        case "h100":
            config = (HERE / "h100.txtpb").read_text()
            chips = topologies.get_topology_desc("h100", platform="cuda", target_config=config, topology="1x1x8")
        case _:
            shape = "2x2x2" if target == "v5p" else "4x8x8"
            chips = topologies.get_topology_desc(f"v5p:{shape}", platform="tpu")
    return tuple(chips.devices)


def warm_up() -> None:
    """The first program that a process compiles pays for much that is done once."""
    jax.jit(lambda x: x @ x + 1).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()


def _compiled(case: Case, times: int) -> tuple[Any, float]:
    """The compiled program, and the CPU seconds to compile it once lowered: the fewest of several times.

    Of all threads, so that a busy machine changes them little.
    """
    seconds: list[float] = []
    compiled: Any = None
    for _ in range(times):
        lowered = _jax.jit(lambda *args: case.f(*args), **case.options).lower(*case.args)
        started = time.process_time()
        compiled = lowered.compile()
        seconds.append(time.process_time() - started)
    return compiled, round(min(seconds), 3)


def _figures(compiled: Any, text: str) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes)
    rest = int(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    traffic = hlo.traffic(hlo.parse(text))
    return {
        "received": traffic.received_bytes, "counted": received_bytes(text), "launches": traffic.launches,
        "temp": temp, "peak": rest + temp,
    }  # fmt: skip


def _doctor(text: str, target: str) -> dict[str, Any]:
    """What the doctor says of the plain program, in bytes that a device receives in one run."""
    chips = devices(target)
    report = examine(text, network=options_on(chips, PlanOptions()).network, platform=chips[0].platform)
    worst = [_place(place) for place in report.places if place.counted and place.wasted_bytes]
    return {"not_needed": sum(one["not_needed"] for one in worst), "could_save": sum(one["saved"] for one in worst),
            "worst": worst[:12]}  # fmt: skip


def _place(place: Place) -> dict[str, Any]:
    return {
        "where": f"{place.where.file}:{place.where.line}",
        "does": place.does,
        "received": place.total_bytes,
        "not_needed": place.wasted_bytes,
        "saved": place.saved_bytes,
        "exact": place.exact,
        "collectives": [one.name for one in place.collectives],
        "moves": [f"{move.source} -> {move.target}" for move in place.moves],
    }


def _compared(case: Case, plain: Any, ours: Any) -> dict[str, Any]:
    """Whether both programs yield the same bits, and the largest difference relative to the largest element."""
    donated = bool({"donate_argnums", "donate_argnames"} & set(case.options))
    data = case.data()
    results = [compiled(*(case.data() if donated else data)) for compiled in (plain, ours)]
    pairs = list(zip(*map(_jax.tree.leaves, results), strict=True))
    pairs = [tuple(np.asarray(_raw(one)) for one in pair) for pair in pairs]
    same = all(one.tobytes() == other.tobytes() for one, other in pairs)
    return {
        "same_bits": same, "difference": max((_difference(*pair) for pair in pairs), default=0.0),
        "finite": all(bool(np.isfinite(one).all()) for one, _ in pairs if one.dtype.kind in "fc"),
        "run_seconds": [_run_seconds(case, compiled) for compiled in (plain, ours)] if not donated else None,
    }  # fmt: skip


def _raw(x: Any) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype("float32") if x.dtype == "bfloat16" else x


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.tobytes() == other.tobytes() or not one.size:
        return 0.0
    wide = complex if one.dtype.kind == "c" else float
    scale = np.nanmax(np.abs(one.astype(wide))) or 1.0
    return float(np.nanmax(np.abs(one.astype(wide) - other.astype(wide))) / scale)


def _run_seconds(case: Case, compiled: Any) -> float:
    data = case.data()
    jax.block_until_ready(compiled(*data))
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*data))
        seconds.append(time.perf_counter() - started)
    return round(min(seconds), 4)


def violations(row: dict[str, Any]) -> list[str]:
    """What must hold and does not."""
    plain, ours = row["plain"], row["pass"]
    allowed = max(plain["peak"], plain.get("handed_back", 0)) * PEAK_SLACK
    broken: list[str] = []
    if ours["received"] > plain["received"] or ours["counted"] > plain["counted"]:
        broken.append("receives more")
    if ours["peak"] > allowed + (0 if row["target"] == "cpu" else 4096):
        broken.append("higher peak")
    if row["why"]:
        broken.append(f"refused: {row['why'][0]}")
    if row["target"] == "cpu" and not row["same_bits"]:
        broken.append(f"other bits, by {row['difference']:.1e}")
    return broken
