"""Instructions of views: aliases, spans, and what one rank of an exchange lists."""

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange
from reshard.lower.program import CastTiles, PutPart, Reorder, TakePart, is_alias
from reshard.lower.program_traffic import program_traffic

MESH = rs.Mesh(x=4)


def program(source: str, target: str, device: int | None = None, **options):
    return lower_plan(rs.plan(rs.Move(*(rs.Layout.parse(text, MESH) for text in (source, target)), **options)), device)


def test_instructions():
    took = program("f32[3{x}2, 5]", "bf16[{x}2, 5]", view="(t h) d -> h d", take={"t": 1}, t=3, cast=True)
    assert [type(each) for each in took.instructions] == [Reorder, TakePart, CastTiles, Reorder]
    assert took.instructions[1].spans == ((1, 1), (0, 2), (0, 5))
    assert [is_alias(each) for each in took.instructions] == [True, False, False, True]
    put = program("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3)
    assert [type(each) for each in put.instructions] == [Reorder, PutPart, Reorder]


def test_an_exchange_of_one_device_has_the_rounds_of_all():
    whole = program("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3).instructions[0]
    assert isinstance(whole, Exchange) and whole.strided
    for device in MESH.devices:
        mine = program("f32[{x}6]", "f32[{x}2]", device, view="(t h) -> h", take={"t": 1}, t=3).instructions[0]
        assert len(mine.rounds) == len(whole.rounds)
        for some, turn in zip(mine.rounds, whole.rounds, strict=True):
            assert some == tuple(t for t in turn if device in (t.sender, t.receiver))
    for turn in whole.rounds:
        for end in ("sender", "receiver"):
            devices = [getattr(transfer, end) for transfer in turn]
            assert len(set(devices)) == len(devices)


def test_traffic_is_counted_in_the_narrower_dtype():
    for source, target in (("f32[{x}4]", "bf16[16]"), ("bf16[{x}4]", "f32[16]"), ("f32[16] + sum{x}", "bf16[16]")):
        plan = rs.plan(rs.Move(*(rs.Layout.parse(text, MESH) for text in (source, target)), cast=True))
        assert max(program_traffic(lower_plan(plan)).received.values()) == plan.received_bytes
