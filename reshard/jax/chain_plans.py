"""Plans for chains, compiled: what could take a chain's place, and what that receives and needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard import hlo
from reshard.doctor.batch_ops import BatchOp
from reshard.doctor.chains import REDUCTIONS, Chain
from reshard.doctor.liveness import Liveness
from reshard.doctor.op_choices import OpMoves
from reshard.doctor.op_layouts import OpFinder, OpReplacement
from reshard.doctor.replacements import Replacement, Unfit
from reshard.errors import ReshardError
from reshard.hlo.splice import Splice, Use
from reshard.jax.chain_fate import ChainFate, fate_of
from reshard.jax.compare import launch_bytes
from reshard.jax.fragments import Fragment, FragmentKey, Fragments
from reshard.jax.op_fragments import OpFragmentKey, OutputKey
from reshard.jax.shift_fragments import ShiftKey
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.layout import Layout
from reshard.types.plan import Plan

ALIGNMENT = 4096
"""Bytes by which buffers are rounded up, and those of tables and scalars."""


class HloPassOptions(NamedTuple):
    """What plans are made for: the network and the budget of `reshard.plan`; `on_platform` fills in no network."""

    network: Network | str | None = None
    budget: int | str | None = None


class Candidate(NamedTuple):
    """What could take a chain's place.

    `excess_bytes` is what it needs beyond `allowed_bytes`, which the chain needs: it fits only where the program's own
    peak is elsewhere.
    """

    chain: Chain
    fate: ChainFate
    replacements: tuple[Replacement | OpReplacement, ...]
    changes: tuple[Splice, ...]
    allowed_bytes: int
    excess_bytes: int


class ChainPlans:
    """The plans for the chains of one module; `metadata` has the name and line that take a chain's place."""

    def __init__(self, fragments: Fragments, options: HloPassOptions, metadata: Callable[[Chain], bytes]) -> None:
        self.fragments = fragments
        self.options = options
        self.metadata = metadata

    def planned(
        self, chain: Chain, fate: ChainFate, replacements: tuple[Replacement, ...], allowed_bytes: Callable[[], int],
        budget: int | None = None,
    ) -> Candidate:  # fmt: skip
        """The plans for a chain under a budget, compiled; raises `Unfit` if they do not receive less.

        What the chain is allowed to need is asked for last: most chains receive no more than is needed.
        """
        keys, uses = self._keys(replacements, budget)
        planned = sum(key.received_bytes for key in keys)
        permutes = sum(len(key.boxes) for key in keys if isinstance(key, ShiftKey))
        if permutes > len(chain.collectives):
            raise Unfit(f"the plan would need {permutes} permutes to receive {planned} B")
        if planned >= fate.received_bytes:
            raise Unfit(f"it receives no more than is needed, {planned} B")
        pieces = [self.fragments.get(key) for key in keys]
        compiled = sum(piece.received_bytes for piece in pieces)
        if compiled >= fate.received_bytes:
            raise Unfit(f"the plan would receive {compiled} B as compiled here, and not {planned} B")
        self._check_launches(fate.received_bytes - compiled, pieces, chain)
        allowed = allowed_bytes()
        excess = max(0, max(piece.peak_bytes for piece in pieces) - allowed - ALIGNMENT)
        region, source = chain.region.computation.name, replacements[0].source
        changes = tuple(
            Splice(region, source, used, piece.module, self.metadata(chain))
            for piece, used in zip(pieces, uses, strict=True)
        )
        plans = tuple(key.plan for key in keys if isinstance(key, FragmentKey))
        fate = replace(fate, planned_bytes=planned, plans=plans, permutes=permutes)
        return Candidate(chain, fate, replacements, changes, allowed, excess)

    def _check_launches(self, saved: int, pieces: Sequence[Fragment], chain: Chain) -> None:
        """Raises `Unfit` if starting more collectives takes longer than the bytes that are saved.

        On CPU, whose devices are threads that stand for others, only bytes count.
        """
        more = sum(piece.launches for piece in pieces) - len(chain.collectives)
        if more > 0 and self.fragments.platform != "cpu" and saved < more * launch_bytes(self.options.network):
            raise Unfit(f"the plan would save {saved} B with {more} more collectives")

    def _keys(
        self, replacements: Sequence[Replacement], budget: int | None
    ) -> tuple[list[FragmentKey | ShiftKey], list[tuple[Use, ...]]]:
        """The fragments that replacements ask for, and what each is used for: all shifts are one fragment."""
        keys: list[FragmentKey | ShiftKey] = []
        uses: list[tuple[Use, ...]] = []
        for one in replacements:
            if one.move is not None:
                plan = self._plan(one.move.source, one.move.target, budget)
                keys.append(FragmentKey(plan, one.before, one.after, one.move.places, one.pick))
                uses.append(one.uses)
        for dtype in dict.fromkeys(one.dtype for one in replacements if one.shift is not None):
            alike = [(one, one.shift) for one in replacements if one.shift is not None and one.dtype == dtype]
            afters = tuple(one.after for one, _ in alike)
            keys.append(ShiftKey(tuple(shift for _, shift in alike), alike[0][0].before, afters, dtype))
            uses.append(tuple(replace(use, output=at) for at, (one, _) in enumerate(alike) for use in one.uses))
        return keys, uses

    def smaller(self, large: Candidate) -> Candidate | None:
        """The candidate with plans that need no more memory than its chain, if it needs more and there are such."""
        if not large.excess_bytes:
            return None
        fate = replace(large.fate, planned_bytes=None, plans=())
        moves = tuple(one for one in large.replacements if isinstance(one, Replacement))
        try:
            pairs = [one.move for one in moves if one.move is not None]
            if tuple(self._plan(one.source, one.target, large.allowed_bytes) for one in pairs) == large.fate.plans:
                return None
            one = self.planned(large.chain, fate, moves, lambda: large.allowed_bytes, large.allowed_bytes)
        except (Unfit, ReshardError):
            return None
        return None if one.excess_bytes else one

    def _plan(self, source: Layout, target: Layout, budget: int | None = None) -> Plan:
        most = self.options.budget if budget is None else budget
        return best_plan(source, target, network=self.options.network, budget=most)

    def op_candidate(
        self, chain: Chain, instruction: hlo.Instruction, op: BatchOp, finder: OpFinder, liveness: Liveness
    ) -> Candidate:
        """The operation that a chain brings whole rows for, run on each device's rows; raises `Unfit`."""
        fate = fate_of(chain)
        fate = replace(fate, does=f"{fate.does}, {op.kind if op.kind != 'ffi' else op.target}")
        one = finder.replacement(chain, instruction, op)
        key = min((self._op_key(one, moves) for moves in one.choices), key=lambda key: key.received_bytes)
        planned = key.received_bytes
        if planned >= fate.received_bytes:
            raise Unfit(f"it receives no more than is needed, {planned} B")
        piece = self.fragments.get(key)
        if piece.received_bytes >= fate.received_bytes:
            raise Unfit(f"the plan would receive {piece.received_bytes} B as compiled here, and not {planned} B")
        allowed = max(liveness.of(chain).peak_bytes, sum(array.nbytes for array in (*op.operands, *op.results)))
        if piece.peak_bytes > allowed + ALIGNMENT:
            raise Unfit(f"the plan would need {piece.peak_bytes} B at once, and XLA needs {allowed} B")
        uses = tuple(replace(use, output=at) for at, output in enumerate(one.outputs) for use in output.uses)
        change = Splice(chain.region.computation.name, one.source, uses, piece.module, self.metadata(chain))
        plans = (key.plan, *(output.plan for output in key.outputs))
        return Candidate(chain, replace(fate, planned_bytes=planned, plans=plans), (one,), (change,), allowed, 0)

    def _op_key(self, one: OpReplacement, moves: OpMoves) -> OpFragmentKey:
        outputs = tuple(
            OutputKey(output.number, self._plan(*pair), output.order, output.after)
            for output, pair in zip(one.outputs, moves.outputs, strict=True)
        )
        indices = tuple(operand.index_dim for operand in one.inputs)
        plan = self._plan(moves.source, moves.rows)
        return OpFragmentKey(one.op, indices, plan, one.before, one.places, outputs)


def allowed_bytes(chain: Chain, liveness: Liveness) -> int:
    """The memory that a chain needs; XLA adds up sums where the summands are."""
    sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
    return liveness.of(chain).peak_bytes - sum(array.nbytes for one in sums for array in one.results)


def too_large(one: Candidate) -> str:
    """Why a candidate is not taken that needs more memory than its chain."""
    peak = one.allowed_bytes + one.excess_bytes + ALIGNMENT
    return f"the plan would need {peak} B at once, and XLA needs {one.allowed_bytes} B"
