"""What the pass says of a chain, in words and as plain data."""

from dataclasses import replace

import reshard as rs
from reshard import hlo
from reshard.doctor.chains import chains
from reshard.doctor.checks.equivalence import Traced
from reshard.doctor.places import ChainFate, fate_of
from tests.doctor.fragments import RESHARD, text

LEFT = ChainFate("train.py:7", "main", "2 all_gather", 896, None, why="it receives no more than is needed, 896 B")


def test_a_chain_that_was_left_says_why():
    assert not LEFT.replaced
    assert str(LEFT) == "train.py:7: 2 all_gather, 896 B received: left, it receives no more than is needed, 896 B"


def test_a_chain_that_was_replaced_says_by_what():
    mesh = rs.Mesh(x=4)
    plan = rs.plan(rs.Layout.parse("f32[{x}2, 8]", mesh), rs.Layout.parse("f32[8, {x}2]", mesh))
    one = replace(LEFT, why="", plans=(plan,), planned_bytes=48)
    assert str(one) == "train.py:7: 2 all_gather, 896 B received: replaced by all_to_all, 48 B"
    shifted = replace(LEFT, why="", planned_bytes=8, permutes=2)
    assert str(shifted).endswith("replaced by permute, permute, 8 B")
    assert (shifted.to_dict()["permutes"], shifted.to_dict()["replaced"]) == (2, True)
    assert str(replace(LEFT, why="", planned_bytes=0)).endswith("replaced by nothing, 0 B")


def test_the_fate_of_a_chain_has_its_bytes_and_names():
    module = hlo.parse(text(*RESHARD))
    traced = Traced(module, 4)
    (chain,) = chains(traced.flow, traced.maps, hlo.collectives(module))
    fate = fate_of(chain)
    assert (fate.received_bytes, fate.planned_bytes) == (192, None)
    assert fate.collectives == {one.name for one in chain.collectives}
