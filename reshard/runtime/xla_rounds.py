"""Plans for XLA:CPU, where large all-to-alls are faster as rounds of permutes.

XLA:CPU packs, sends and joins all blocks of an all-to-all, also the one that stays on its device: three copies of the
tile. In rounds, that block is copied twice and needs no buffers, but each round is a launch.
"""

from __future__ import annotations

from reshard.lower.program import Exchange, lower_steps
from reshard.lower.to_shard_map import joins_in_one_copy
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import PLAIN
from reshard.types.rules.exchange import exchange_size

LEAST_MESSAGE = 1 << 20
"""From this many bytes of a message, a round saves more than its launch costs. In more rounds than `FEW_ROUNDS` it is
twice as many bytes: they save a smaller share."""
FEW_ROUNDS = 3
MOST_ROUNDS = 15
"""The most rounds of an exchange that takes the place of an all-to-all."""


def in_rounds(plan: Plan, least: int = LEAST_MESSAGE) -> Plan:
    """The plan with its all-to-alls as exchanges where messages have `least` bytes or more, twice that in many rounds.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> [step.kind for step in in_rounds(plan(rows, columns), least=16).steps]
    ['exchange']
    """
    specs = [
        StepSpec("exchange", step.result) if _faster(step, least) else StepSpec(step.kind, step.result, step.mode)
        for step in plan.steps
    ]
    if all(spec.kind == step.kind for spec, step in zip(specs, plan.steps, strict=True)):
        return plan
    return chain(plan.source, plan.target, specs, plan.donate, [step.seconds for step in plan.steps], plan.view)


def _faster(step: Step, least: int) -> bool:
    """Whether a step is an all-to-all that takes less time in rounds."""
    if step.kind != "all_to_all" or step.mode != PLAIN:
        return False
    size = exchange_size(step.operand, step.result)
    enough = least if size.rounds <= FEW_ROUNDS else 2 * least
    if step.operand.nbytes(size.message) < enough or size.rounds > MOST_ROUNDS:
        return False
    (exchange,) = lower_steps(step.operand, [Step("exchange", step.operand, step.result)]).instructions
    return isinstance(exchange, Exchange) and joins_in_one_copy(exchange)
