"""What moves cost: the seconds, the bytes and the memory of the plan from one layout to another, for many pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from reshard.plans.plan import Plan
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_plan
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


class MovePrice(NamedTuple):
    """What the plan from one layout to another takes: predicted seconds, bytes that the busiest device receives, and
    bytes that it holds at most, source and target included."""

    seconds: float
    received_bytes: int
    peak_bytes: int


class MovePrices:
    """The prices of moves between layouts on a mesh, whose axes have the links of a network.

    >>> mesh = Mesh(x=4, y=2)
    >>> prices = MovePrices(mesh, "h100")
    >>> rows, whole = (Layout.parse(text, mesh) for text in ("f32[{x}256, 512]", "f32[1024, 512]"))
    >>> price = prices.price(rows, whole)
    >>> price.received_bytes, price.seconds == prices.plan(rows, whole).seconds
    (1572864, True)
    """

    def __init__(self, mesh: Mesh, network: Network | str) -> None:
        self.mesh = mesh
        self._options = PlanOptions.read(network=network)

    def price(self, source: Layout, target: Layout) -> MovePrice:
        """The price of one move; of none, if source and target are equal, its memory alone."""
        # The planner keeps its plans, so that equal pairs are planned once.
        plan = self.plan(source, target)
        return MovePrice(plan.seconds or 0.0, plan.received_bytes, plan.peak_bytes)

    def price_pairs(self, pairs: Iterable[tuple[Layout, Layout]]) -> list[MovePrice]:
        """The price of each move, in their order."""
        return [self.price(source, target) for source, target in pairs]

    def plan(self, source: Layout, target: Layout) -> Plan:
        """The plan that the price of a move is of."""
        return find_plan(source, target, self._options)
