"""Chains: the states of a pair are layouts, one collective apart, whose kind the typing rules accept."""

from __future__ import annotations

from itertools import pairwise

import pytest

from reshard.errors import StepError
from reshard.plans.plan import StepSpec
from reshard.plans.rules.collectives import RULES, check_step
from reshard.synth.routes import Pair
from reshard.synth.routes.chains import (
    Borrowing,
    Chains,
    State,
    kind_between,
    visit_states,
)
from reshard.types import Mesh
from reshard.types.whole import primes
from tests.synth.routes.candidates import pair_of, random_chains, runs

CUBE = Mesh(x=2, y=2, z=2)


def chains_of(source: str, target: str, mesh: Mesh) -> Chains:
    pair = pair_of(source, target, mesh)
    assert pair.refinement is not None
    return Chains(pair, pair.refinement)


def text(chains: Chains, state: State) -> str:
    return str(chains.layout(state))


# ---- states by hand ------------------------------------------------------------------------------


def test_the_states_of_the_worked_example():
    """The table in `normal`: digit 4 starts the chain - -> y -> z, digit 2 is held by the spent x."""
    chains = chains_of("f32[{y}{x}2, 4]", "f32[{z}4, {y}2]", CUBE)
    x, y, z = (CUBE.stride(CUBE.sub_axis(name)) for name in "xyz")
    assert chains.start == (y, x, None, None, None)
    assert chains.sliced() == (y, x, None, z, None)
    assert chains.ungathered() == (z, x, None, y, None)
    assert chains.end == (z, None, None, y, None)
    assert [chains.tail(at) for at in range(5)] == [z, None, None, z, None]
    assert [chains.head(at) for at in range(5)] == [None, x, None, None, None]
    assert text(chains, chains.sliced()) == "f32[{y}{x}2, {z}2]"
    assert text(chains, chains.ungathered()) == "f32[{z}{x}2, {y}2]"


def test_a_swap_borrows_the_axes_of_an_open_cycle():
    mesh = Mesh(x=2, y=2, z=2, w=2)
    chains = chains_of("f32[4, {x}{z}, {y}2]", "f32[4, 4, {w}{z}]", mesh)
    w, y = mesh.stride(mesh.sub_axis("w")), mesh.stride(mesh.sub_axis("y"))
    assert chains.borrowings() == (Borrowing(head=4, tail=2, free=w, spent=y),)
    assert text(chains, chains.sliced(chains.borrowings())) == "f32[4, {x}{z}, {y}{w}]"
    assert text(chains, chains.ungathered(chains.borrowings())) == "f32[4, {x}{y}, {w}{z}]"
    assert kind_between(chains.sliced(chains.borrowings()), chains.ungathered(chains.borrowings())) == "permute"


def test_only_axes_of_the_same_size_are_borrowed():
    mesh = Mesh(x=2, y=3, z=2, w=3)
    assert chains_of("f32[4, {x}{z}, {y}2]", "f32[4, 4, {w}{z}]", mesh).borrowings() == ()


def test_a_detour_crosses_a_swap_along_the_free_axis_of_a_slice():
    chains = chains_of("f32[{x}2, 4, 4]", "f32[4, {x}2, {y}2]", Mesh(x=2, y=2))
    assert [text(chains, state) for state in chains.detour()] == [
        "f32[{x}2, {y}2, 4]",
        "f32[{y}2, {x}2, 4]",
        "f32[4, {x}2, {y}2]",
    ]


def test_swaps_alone_leave_permute_cycles():
    chains = chains_of("f32[{x}4, {y}4, {z}4, 8]", "f32[{y}4, {x}4, 8, {z}4]", CUBE)
    assert text(chains, chains.swaps_alone(chains.start, chains.end)) == "f32[{x}4, {y}4, 8, {z}4]"


def test_one_by_one_moves_a_chain_on_by_one_holder():
    chains = chains_of("f32[{y}4, 8, {z}4]", "f32[8, {z}4, {y}4]", CUBE)
    states = list(chains.one_by_one(chains.start, chains.end))
    assert [text(chains, state) for state in states] == ["f32[{y}4, {z}4, 8]", "f32[8, {z}4, {y}4]"]


# ---- any pair ------------------------------------------------------------------------------------


def test_digits_of_pairs_with_permute_cycles_are_prime():
    for chains in random_chains(2, 60):
        if chains.refinement.swapped:
            held = [d.radix for d in chains.digits if d.src is not None or d.dst is not None]
            assert all(primes(radix) == [radix] for radix in held)


def test_the_step_between_slice_and_gather_keeps_the_size_of_the_tile():
    for chains in random_chains(3, 200, even=True):
        first, last = chains.sliced(), chains.ungathered()
        assert chains.layout(first).tile_bytes == chains.layout(last).tile_bytes
        assert kind_between(chains.start, first) == "slice" if chains.start != first else True
        assert kind_between(last, chains.end) == "all_gather" if last != chains.end else True


def test_the_kind_of_a_step_is_one_that_its_rule_accepts():
    seen: set[str] = set()
    for chains in random_chains(4, 150):
        first, last = chains.sliced(), chains.ungathered()
        ways = [[first, last], chains.detour(), [first, *chains.one_by_one(first, last), last]]
        ways.append([first, chains.swaps_alone(first, last), last])
        for states in ways:
            path = [chains.start, *states, chains.end]
            for before, after in pairwise(path):
                if before != after:
                    seen.add(kind_between(before, after))
                    check_step(kind_between(before, after), chains.layout(before), chains.layout(after))
    assert seen == {"slice", "all_gather", "all_to_all", "permute", "exchange"}


def test_an_exchange_is_named_only_where_no_other_rule_accepts():
    for chains in random_chains(5, 150):
        before, after = chains.layout(chains.sliced()), chains.layout(chains.ungathered())
        if chains.sliced() == chains.ungathered() or kind_between(chains.sliced(), chains.ungathered()) != "exchange":
            continue
        for other in set(RULES) - {"exchange"}:
            with pytest.raises(StepError):
                check_step(other, before, after)


def test_routes_through_states_run():
    for chains in random_chains(6, 60):
        for route in (
            visit_states(chains, [chains.sliced(), chains.ungathered()]),
            (StepSpec("exchange", chains.target),),
        ):
            runs(Pair(chains.source, chains.target), route)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ((None, None, 1), (4, 2, 1), "slice"),
        ((4, 2, 1), (None, 2, None), "all_gather"),
        ((4, None, 2, None), (None, 4, None, 2), "all_to_all"),
        ((4, 2, None), (2, 4, None), "permute"),
        ((4, None), (2, None), "permute"),
        ((4, None), (None, 2), "exchange"),  # gathered by one stride, sliced by another
        ((4, None, None), (None, 4, 2), "exchange"),  # a swap and a slice
        ((4, None, 2, 1), (None, 4, 1, 2), "exchange"),  # a swap and a permute cycle
        ((None, 2), (2, 1), "exchange"),  # the start of a chain is no slice: 2 is not free
    ],
)
def test_kinds_by_hand(before: State, after: State, name: str):
    assert kind_between(before, after) == name
