"""`plan_tree`: many arrays planned as one, in few launches and within one budget.

planner        each array on its own; equal moves once
batches        arrays whose steps share launches, in the order in which the peak is lowest
tree_budget    where that does not fit: arrays are cut, and batches made smaller
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from reshard.errors import BudgetError, PlanError, ReshardError, quoted
from reshard.synth.batches import batches_of, in_order
from reshard.synth.network import Network
from reshard.synth.planner import SLACK, bytes_of, checked_slack, network_of, plan
from reshard.synth.tree_budget import within
from reshard.types.flags import checked_flag
from reshard.types.layout import Layout
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan, device_kinds
from reshard.types.tree_memory import peaks
from reshard.types.tree_names import flattened


def plan_tree(
    moves: Mapping[str, Any] | Sequence[Any],
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    slack: float = SLACK,
) -> TreePlan:
    """The plans of many arrays, in batches that share launches.

    `moves` is a dict, list or tuple, nested or not, of (source, target) pairs, or of what `plan` takes in their place;
    an array's name is the path to it, such as "layers.0.w". `budget` bounds what lives on a device at any time: all
    sources, all targets and all buffers. The other options are those of `plan`, for every array. Equal trees give equal
    plans in every process.

    Raises the errors of `plan`, with the array's name, and `BudgetError`, with the smallest budget that works.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> ends = {"w": ("f32[{x}4, 8]", "f32[16, 8]"), "b": ("f32[{x}2]", "f32[8]")}
    >>> tree = plan_tree({name: tuple(Layout.parse(end, mesh) for end in pair) for name, pair in ends.items()})
    >>> tree.launches, [batch.names for batch in tree.batches]
    (1, [('w', 'b')])
    """
    flat = flattened(moves)
    limit = bytes_of(budget)
    request = _Request(network_of(network), checked_flag(donate, "donate"), checked_slack(slack))
    plans = {name: request.planned(name, leaf) for name, leaf in flat.items()}
    kinds = device_kinds(plans.values())
    batches = in_order(batches_of(plans, request.network), kinds)
    if limit is not None and max(peaks([kinds.footprint(batch) for batch in batches])) > limit:

        def replan(name: str, room: int) -> Plan:
            return request.planned(name, flat[name], room)

        batches = within(plans, replan, kinds, limit, request.network)
    return TreePlan(tuple(flat), tuple(batches))


@dataclass(frozen=True)
class _Request:
    """What is the same for all arrays."""

    network: Network | None
    donate: bool
    slack: float

    def planned(self, name: str, leaf: Any, budget: int | None = None) -> Plan:
        """The plan of one array; its errors name it."""
        ends = cast("list[Any]", leaf) if isinstance(leaf, tuple | list) else [leaf]
        if isinstance(leaf, Layout):
            raise PlanError(f"{name}: the layout {leaf} has no target; give a (source, target) pair of layouts")
        make = partial(plan, budget=budget, network=self.network, donate=self.donate, slack=self.slack)
        try:
            return make(*ends)
        except BudgetError:
            raise
        except ReshardError as error:
            raise type(error)(f"{name}: {error}") from None
        except TypeError:
            raise PlanError(f"{name}: {quoted(ends)} is not a move; give a (source, target) pair of layouts") from None
