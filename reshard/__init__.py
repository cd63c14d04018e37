"""Sharding specs as types: the cheapest collectives between two layouts of a distributed array.

    Mesh, Layout        devices on named axes; where each element of an array is
    as_layout           reads a layout in any form: text in every notation, the arrays and shardings of JAX and torch
    Move                source and target with a view between their indices, parts, and a cast
    plan, Plan, Step    the steps from one layout to another, with their bytes, launches and memory
    plan_tree, TreePlan the plans of many arrays as one, in few launches and within one budget
    sweep, path         a table of plans of many pairs, meshes and networks; the cheapest way through alternatives
    Manifest, Update    names, shapes, layouts and versions that two sides compare before anything moves
    Network, Link       what bytes cost along each mesh axis
    from_xarray         the layout of an xarray.DataArray, by the names of its dims
    from_jaxtyping      that of a jaxtyping annotation
    prove, Proof        that a plan is right for all sizes of its form, and within its promise
    verify              that a list of transfers, whoever made it, is right, and how far it is from the bound
    redistribute        an array in another layout, of JAX, of MPI ranks, or in tiles in this process (dispatch)
    simulate            a plan run on numpy, all devices in this process
    errors              what is raised
    names               tables of rules from one framework's names of arrays to another's
    files               checkpoints and stored arrays: every stored byte read once, by plan
    jax, mpi, draw      plans in JAX programs, on MPI ranks, and as pictures: loaded when they are first used

>>> import reshard as rs
>>> mesh = rs.Mesh(x=4, y=2)
>>> source = rs.Layout.parse("f32[{y}8, 16, {x}4]", mesh)
>>> target = rs.Layout.parse("f32[16, {x}{y}2, 16]", mesh)
>>> print(rs.plan(source, target))
f32[{y}8, 16, {x}4] -> f32[16, {x}{y}2, 16] on <x=4, y=2>
  step        type after it         received    live
  all_to_all  f32[16, {x}{y}2, 16]    1792 B  6144 B
received 1792 B (bound 1792 B), 1 launch, peak 6144 B a device
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 12):  # noqa: UP036  A checkout on the path: pip would have refused it.
    raise ImportError(f"reshard needs Python 3.12 or later, and this is {sys.version.split()[0]}")

from reshard import errors as errors
from reshard.errors import ProofError as ProofError
from reshard.types import Layout as Layout
from reshard.types import Mesh as Mesh

if TYPE_CHECKING:
    from reshard import draw as draw
    from reshard import files as files
    from reshard import jax as jax
    from reshard import mpi as mpi
    from reshard import names as names
    from reshard.dispatch import redistribute as redistribute
    from reshard.geometry.detect import as_layout as as_layout
    from reshard.plans.manifest import Manifest as Manifest
    from reshard.plans.manifest import Update as Update
    from reshard.plans.plan import Plan as Plan
    from reshard.plans.plan import TreePlan as TreePlan
    from reshard.plans.step import Step as Step
    from reshard.proofs import Proof as Proof
    from reshard.proofs import prove as prove
    from reshard.proofs import verify as verify
    from reshard.runtime import simulate as simulate
    from reshard.synth import Link as Link
    from reshard.synth import Network as Network
    from reshard.synth import plan as plan
    from reshard.synth import plan_tree as plan_tree
    from reshard.synth.sweeps import path as path
    from reshard.synth.sweeps import sweep as sweep
    from reshard.types.move import Move as Move
    from reshard.types.named_dims import from_jaxtyping as from_jaxtyping
    from reshard.types.named_dims import from_xarray as from_xarray

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "Link",
    "Manifest",
    "Mesh",
    "Move",
    "Network",
    "Plan",
    "Proof",
    "ProofError",
    "Step",
    "TreePlan",
    "Update",
    "as_layout",
    "errors",
    "from_jaxtyping",
    "from_xarray",
    "path",
    "plan",
    "plan_tree",
    "prove",
    "redistribute",
    "simulate",
    "sweep",
    "verify",
]

_HOMES = {
    "Link": "reshard.synth",
    "Move": "reshard.types.move",
    "Manifest": "reshard.plans.manifest",
    "Network": "reshard.synth",
    "Plan": "reshard.plans.plan",
    "Proof": "reshard.proofs",
    "Step": "reshard.plans.step",
    "TreePlan": "reshard.plans.plan",
    "Update": "reshard.plans.manifest",
    "as_layout": "reshard.geometry.detect",
    "from_jaxtyping": "reshard.types.named_dims",
    "from_xarray": "reshard.types.named_dims",
    "path": "reshard.synth.sweeps",
    "plan": "reshard.synth",
    "plan_tree": "reshard.synth",
    "prove": "reshard.proofs",
    "redistribute": "reshard.dispatch",
    "simulate": "reshard.runtime",
    "sweep": "reshard.synth.sweeps",
    "verify": "reshard.proofs",
}
_PACKAGES = {"draw": "matplotlib", "files": None, "jax": "jax", "mpi": "mpi4py", "names": None}


def __getattr__(name: str) -> Any:
    """Loads the planner, the prover and the runtimes when they are first used: `import reshard` loads the language."""
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if name not in _PACKAGES:
        like = errors.did_you_mean(name, [*__all__, *_PACKAGES])
        like = f"; it is reshard.errors.{name}" if hasattr(errors, name) else like
        raise AttributeError(f"module 'reshard' has no attribute {name!r}{like}")
    try:
        return import_module(f"reshard.{name}")
    except ModuleNotFoundError as error:
        if error.name != _PACKAGES[name]:
            raise
        raise ImportError(f"reshard.{name} needs {_PACKAGES[name]}: pip install {_PACKAGES[name]}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PACKAGES])
