"""A serialized module is read as its text is: the same instructions, attributes, lines and collectives."""

import pytest

from reshard import hlo
from reshard.hlo.proto import ModuleProto
from reshard.hlo.proto_reader import read_proto
from reshard.hlo.wire import ProtoMessage, decode_message, encode_message
from tests.hlo.splices import NAMES, recorded

READ = (
    "dimensions", "slice", "padding", "replica_groups", "source_target_pairs", "channel_id", "use_global_device_ids",
    "direction", "iota_dimension", "index", "fft_type", "fft_length", "custom_call_target", "frontend_attributes",
    "dynamic_slice_sizes", "calls", "to_apply", "condition", "body", "backend_config",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_text_and_proto_are_one_module(name):
    text, proto = hlo.parse(recorded(name).text), read_proto(recorded(name).module)
    assert text.name == proto.name and text.entry.name == proto.entry.name
    assert set(text.computations) == set(proto.computations)
    for one in text.computations.values():
        other = proto.computation(one.name)
        assert [each.name for each in one.instructions] == [each.name for each in other.instructions]
        for a, b in zip(one.instructions, other.instructions, strict=True):
            assert (a.opcode, a.root, a.shape, a.operands, a.called) == (
                b.opcode,
                b.root,
                b.shape,
                b.operands,
                b.called,
            )
            assert {key: a.attributes.get(key) for key in READ} == {key: b.attributes.get(key) for key in READ}
            whole = a.is_array and a.shape.dtype in ("s32", "u32", "pred") and not a.shape.dims
            assert a.literal == b.literal or not whole
            sources = [m.frames.source(i.metadata) if i.metadata else None for m, i in ((text, a), (proto, b))]
            assert sources[0] == sources[1] and (sources[0] is None or sources[0].frames == sources[1].frames)
    figures = [
        [(c.kind, c.name, c.received_bytes, c.times, c.source, c.operands, c.results) for c in hlo.collectives(module)]
        for module in (text, proto)
    ]
    assert figures[0] == figures[1] != []


def test_computations_that_two_modules_share_are_read_once():
    old = ModuleProto.decode(recorded("scan_cpu").module)
    new = ModuleProto.decode(recorded("scan_cpu").module, like=old)
    assert read_proto(old).entry is read_proto(new).entry


def edited(opcode, field, *values):
    """The first instruction of that opcode of a recorded module, read after one of its fields was set."""
    module = ModuleProto.decode(recorded("scan_cpu").module)
    one = next(each for each in module.instructions() if each.opcode == opcode)
    one.message.remove(93)
    one.message.set_all_data(field, [encode_message(message(value)) for value in values])
    read = read_proto(decode_again(module))
    return next(each for held in read.computations.values() for each in held.instructions if each.name == one.name)


def message(fields):
    made = ProtoMessage([])
    for number, value in fields.items():
        match value:
            case int():
                made.set_number(number, value)
            case bytes():
                made.set_data(number, value)
            case _:
                made.set_numbers(number, value)
    return made


def decode_again(module):
    for one in module.computations:
        assert decode_message(one.encode())
    return module.encode()


def test_replica_groups_of_every_form():
    iota = {1: 4, 2: 2, 3: [2, 4], 4: [1, 0]}
    assert edited("all-gather", 92, iota).attributes["replica_groups"] == "[4,2]<=[2,4]T(1,0)"
    listed = edited("all-gather", 49, {1: [0, 2]}, {1: [1, 3]})
    assert listed.attributes["replica_groups"] == "{{0,2},{1,3}}"
    nested = edited("all-gather", 87, {2: encode_message(message(iota))})
    assert nested.attributes["replica_groups"] == "[4,2]<=[2,4]T(1,0)"
    axis, part = (
        encode_message(message({1: b"x", 2: 8})),
        encode_message(message({2: encode_message(message({1: 2, 2: 2}))})),
    )
    mesh = encode_message(message({1: axis, 2: [3, 1, 2, 0, 4, 5, 6, 7]}))
    ordered = edited("all-gather", 93, {1: mesh, 2: part}).attributes
    assert ordered["replica_groups"] == "mesh['x'=8]" and ordered["device_ids"] == "(3,1,2,0,4,5,6,7) {'x':(2)2}"
    assert edited("all-gather", 92).attributes["replica_groups"] == "{}"
