"""Whether this tree plans what another commit plans: steps, bytes, launches and peak memory, case by case.

    python benchmarks/same_plans.py --against main~5              # 3,000 pairs, 1,000 between device sets, 500 moves
    python benchmarks/same_plans.py --against main~5 --share 20   # a twentieth of these, 200 trees

Random layouts of the language, random device sets, random moves with views and parts, and trees of them, some with a
budget, a network or a donated source. Each tree plans the same cases, written as text, with its own code. A case is
better or worse in the order in which the planner decides: bytes of the busiest device, launches, then the peak (a
budget bounds that anyway).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: a run for another tree finds that one first

import reshard as rs
from reshard.errors import ReshardError

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"pair": 3000, "devices": 1000, "move": 500, "tree": 200}
NETWORKS = ("tpu-v5p", "h100")
Case = dict[str, Any]


def random_cases(kind: str, count: int, seed: int) -> Iterator[Case]:
    """Cases of a kind, the same for the same seed."""
    from tests.layouts import random_crossing, random_pair
    from tests.trees import random_tree
    from tests.view_oracle import random_case

    for number in range(count):
        choose = random.Random(f"{kind} {seed} {number}")
        case: Case = {"kind": kind, "options": _random_options(choose, kind)}
        if kind == "move":
            yield {**case, "move": random_case(choose, "int32").move.to_json()}
        elif kind == "tree":
            yield {**case, "ends": {name: _ends(*ends) for name, ends in random_tree(choose).items()}}
        else:
            pair = random_pair if kind == "pair" else random_crossing
            yield {**case, "ends": _ends(*pair(choose, "int32", choose.random() < 0.2))}


def _random_options(choose: random.Random, kind: str) -> Case:
    """Options of a call; `share` of a budget is in hundredths of the peak without one."""
    options: Case = {}
    if choose.random() < 0.3:
        options["donate"] = True
    if choose.random() < 0.3:
        options["share"] = choose.choice([60, 80, 100, 120])
    if choose.random() < 0.3 and kind != "tree":
        options["network"] = choose.choice(NETWORKS)
    return options


def _ends(source: rs.Layout, target: rs.Layout) -> Case:
    meshes = {"mesh": source.mesh.to_dict(), "target_mesh": target.mesh.to_dict()}
    return {"source": str(source), "target": str(target), **meshes}


def plan_case(case: Case) -> Case:
    """The figures of a case's plan with the code of this process, or the class of its error."""
    options = dict(case["options"])
    share = options.pop("share", None)
    try:
        plan = _plan(case, options)
        if share is not None:
            plan = _plan(case, {**options, "budget": plan.peak_bytes * share // 100})
    except ReshardError as error:
        return {"error": type(error).__name__}
    plans = plan.plans if case["kind"] == "tree" else {"": plan}
    bytes_of = [plan.received_bytes, plan.sent_bytes] if case["kind"] != "tree" else [plan.received_bytes]
    return {"figures": [*bytes_of, plan.launches, plan.peak_bytes], "steps": {n: _steps(p) for n, p in plans.items()}}


def _plan(case: Case, options: Case) -> Any:
    if case["kind"] == "move":
        return rs.plan(rs.Move.from_json(case["move"]), **options)
    if case["kind"] == "tree":
        return rs.plan_tree({name: _read(ends) for name, ends in case["ends"].items()}, **options)
    return rs.plan(*_read(case["ends"]), **options)


def _read(ends: Case) -> tuple[rs.Layout, rs.Layout]:
    source, target = rs.Mesh.from_dict(ends["mesh"]), rs.Mesh.from_dict(ends["target_mesh"])
    return rs.Layout.parse(ends["source"], source), rs.Layout.parse(ends["target"], target)


def _steps(plan: Any) -> list[Any]:
    """Each step by what any version calls alike: an exchange seen through a view was once a kind of its own."""
    return [
        [step.kind.replace("view_exchange", "exchange"), str(step.result), step.received_bytes, step.live_bytes]
        for step in plan.steps
    ]


def figures_of(tree: Path, cases: Path) -> list[Case]:
    """What the code of a tree plans for the cases of a file."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(Path(__file__).resolve()), "--cases", str(cases)]
    run = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def compare(before: Case, now: Case) -> str:
    """What became of a case: same, other steps, better, worse, refused or planned.

    >>> compare({"figures": [8, 1, 30], "steps": {}}, {"figures": [8, 1, 24], "steps": {}})
    'better'
    """
    if before == now:
        return "same"
    if "error" in before or "error" in now:
        return "planned" if "error" in before and "error" not in now else "refused"
    if before["figures"] == now["figures"]:
        return "other steps"
    return "better" if now["figures"] < before["figures"] else "worse"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a commit, or a folder that holds a checkout")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="an N-th of the cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        for line in options.cases.read_text(encoding="utf-8").splitlines():
            print(json.dumps(plan_case(json.loads(line))))
        return 0
    from benchmarks.planner_against import worktree

    cases = [case for kind, n in COUNTS.items() for case in random_cases(kind, -(-n // options.share), options.seed)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cases.jsonl"
        file.write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
        if Path(options.against).is_dir():
            before = figures_of(Path(options.against).resolve(), file)
        else:
            with worktree(options.against) as tree:
                before = figures_of(tree, file)
        now = figures_of(ROOT, file)
    outcomes = [compare(b, n) for b, n in zip(before, now, strict=True)]
    for kind in COUNTS:
        counts = Counter(outcome for case, outcome in zip(cases, outcomes, strict=True) if case["kind"] == kind)
        print(f"{kind:8} {sum(counts.values()):5}  " + ", ".join(f"{what} {n}" for what, n in counts.most_common()))
    bad = [at for at, outcome in enumerate(outcomes) if outcome in ("worse", "refused", "other steps")]
    for at in bad[:5]:
        print(json.dumps({"outcome": outcomes[at], "case": cases[at], "before": before[at], "now": now[at]}))
    return int(any(outcomes[at] in ("worse", "refused") for at in bad))


if __name__ == "__main__":
    sys.exit(main())
