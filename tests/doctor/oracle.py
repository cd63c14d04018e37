"""An interpreter of HLO's moves that runs a module forwards, on all devices at once.

The doctor traces elements backwards; here every element of a parameter, and of any other value that is not a move,
gets a number of its own, and the numbers are carried forwards. Apart from the parser of HLO's text, the two must not
share code: a fault in a shared index map would be invisible.
"""

import re

import numpy as np

from reshard import hlo
from reshard.hlo.executed_collectives import read_permute_pairs

_BIG = 1 << 40


class Machine:
    """The values of a module by name, as arrays with a leading dim for the devices.

    `made` has the first number of each value that is not a move.
    """

    def __init__(self, text):
        self.module = hlo.parse(text)
        self.devices = self.module.devices or 1
        self.fresh = 0
        self.made = {}
        self.values = {}
        self.run(self.module.entry, {})

    def run(self, computation, arguments):
        values = dict(arguments)
        for one in computation.instructions:
            if one.name not in values:
                values[one.name] = self.value(one, values)
        self.values |= values
        return values

    def value(self, one, values):
        method = getattr(self, "do_" + one.opcode.replace("-", "_"), None)
        operands = [values[name] for name in one.operands]
        moved = None if method is None else method(one, *operands)
        return self.new(one) if moved is None else moved

    def new(self, one):
        """Numbers that no other value has."""
        if not isinstance(one.shape, hlo.Array):
            return None
        shape = (self.devices, *one.shape.dims)
        base, self.fresh = (1 + self.fresh) * _BIG, self.fresh + 1
        self.made[one.name] = base
        return base + np.arange(np.prod(shape, dtype=int)).reshape(shape)

    def shaped(self, one, rows):
        return np.asarray(rows).reshape(self.devices, *one.shape.dims)

    # ---- numbers

    def do_constant(self, one):
        if not re.match(r"[su]\d+", one.shape.dtype):
            return np.full((self.devices, *one.shape.dims), -1)
        numbers = [int(n) for n in re.findall(r"-?\d+", one.literal)]
        return self.shaped(one, [numbers] * self.devices)

    def do_partition_id(self, one):
        return np.arange(self.devices)

    def do_multiply(self, one, a, b):
        return a * b if one.shape.dtype in ("s32", "u32") else None

    def do_convert(self, one, a):
        return a

    def do_compare(self, one, a, b):
        return {"LT": a < b, "GE": a >= b, "EQ": a == b}[one.attributes["direction"]]

    def do_iota(self, one):
        line = np.arange(one.shape.dims[int(one.attributes["iota_dimension"])])
        shape = [-1 if at == int(one.attributes["iota_dimension"]) else 1 for at in range(len(one.shape.dims))]
        return np.broadcast_to(line.reshape(shape), (self.devices, *one.shape.dims))

    # ---- moves on a device

    def do_copy(self, one, a):
        return a

    def do_reshape(self, one, a):
        return self.shaped(one, a)

    def do_bitcast(self, one, a):
        order = [int(n) for n in re.findall(r"\d+", one.shape.layout.partition(":")[0])][::-1]
        inside = self.layouts(one)
        memory = a.transpose(0, *(1 + at for at in inside)).reshape(self.devices, -1)
        shape = [one.shape.dims[at] for at in order]
        return memory.reshape(self.devices, *shape).transpose(0, *(1 + np.argsort(order)))

    def layouts(self, one):
        """The dims of the operand in the order of its memory layout, major first."""
        operand = next(
            i for c in self.module.computations.values() for i in c.instructions if i.name == one.operands[0]
        )
        order = [int(n) for n in re.findall(r"\d+", operand.shape.layout.partition(":")[0])][::-1]
        return order or list(range(len(operand.shape.dims)))

    def do_transpose(self, one, a):
        return a.transpose(0, *(1 + int(n) for n in re.findall(r"\d+", one.attributes["dimensions"])))

    def do_broadcast(self, one, a):
        dims = [int(n) for n in re.findall(r"\d+", one.attributes["dimensions"])]
        shape = [one.shape.dims[at] if at in dims else 1 for at in range(len(one.shape.dims))]
        return np.broadcast_to(a.reshape(self.devices, *shape), (self.devices, *one.shape.dims))

    def do_slice(self, one, a):
        ranges = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", one.attributes["slice"])
        return a[(slice(None), *(slice(int(x), int(y), int(z or 1)) for x, y, z in ranges))]

    def do_reverse(self, one, a):
        return np.flip(a, [1 + int(n) for n in re.findall(r"\d+", one.attributes["dimensions"])])

    def do_pad(self, one, a, filling):
        edges = [[int(n) for n in dim.split("_")] for dim in one.attributes["padding"].split("x")]
        for at, (low, high, *inner) in enumerate(edges, 1):
            if inner and inner[0]:
                spread = np.full([s * (1 + inner[0]) - inner[0] if d == at else s for d, s in enumerate(a.shape)], -1)
                spread[(slice(None),) * at + (slice(None, None, 1 + inner[0]),)] = a
                a = spread
            a = a[(slice(None),) * at + (slice(max(0, -low), a.shape[at] - max(0, -high)),)]
            edge = [(max(0, low), max(0, high)) if d == at else (0, 0) for d in range(a.ndim)]
            a = np.pad(a, edge, constant_values=-1)
        return a

    def do_concatenate(self, one, *parts):
        return np.concatenate(parts, 1 + int(re.search(r"\d+", one.attributes["dimensions"])[0]))

    def do_dynamic_slice(self, one, a, *offsets):
        sizes = one.shape.dims
        rows = []
        for device in range(self.devices):
            starts = [min(max(0, int(o[device])), n - m) for o, n, m in zip(offsets, a.shape[1:], sizes, strict=True)]
            rows.append(a[device][tuple(slice(s, s + m) for s, m in zip(starts, sizes, strict=True))])
        return np.stack(rows)

    def do_select(self, one, which, a, b):
        return np.where(which.reshape(which.shape + (1,) * (a.ndim - which.ndim)), a, b)

    def do_tuple(self, one, *parts):
        return parts

    def do_get_tuple_element(self, one, parts):
        return parts[int(one.attributes["index"])]

    def do_fusion(self, one, *operands):
        computation = self.module.computation(one.called[0])
        parameters = [i for i in computation.instructions if i.opcode == "parameter"]
        numbered = {i.name: operands[int(i.literal)] for i in parameters}
        return self.run(computation, numbered)[computation.root.name]

    # ---- moves between devices

    def groups(self, one):
        text = one.attributes["replica_groups"]
        order = one.attributes.get("device_ids")
        return hlo.parse_groups(text + (f", device_ids={order}" if order else ""), self.devices).lists

    def do_all_gather(self, one, a):
        dim = int(re.search(r"\d+", one.attributes["dimensions"])[0])
        rows = [None] * self.devices
        for group in self.groups(one):
            for device in group:
                rows[device] = np.concatenate([a[other] for other in group], dim)
        return np.stack(rows)

    def do_all_to_all(self, one, *parts):
        rows = [[None] * self.devices for _ in parts]
        whole = len(parts) == 1
        for group in self.groups(one):
            dim = int(re.search(r"\d+", one.attributes["dimensions"])[0]) if whole else 0
            for rank, device in enumerate(group):
                sent = [np.split(parts[0][o], len(group), dim) if whole else [p[o] for p in parts] for o in group]
                got = [pieces[rank] for pieces in sent]
                if whole:
                    rows[0][device] = np.concatenate(got, dim)
                else:
                    for at, piece in enumerate(got):
                        rows[at][device] = piece
        results = tuple(np.stack(row) for row in rows)
        return results[0] if whole else results

    def do_collective_broadcast(self, one, a):
        got = np.full_like(a, -1)
        for first, *others in self.groups(one):
            for device in (first, *others):
                got[device] = a[first]
        return got

    def do_collective_permute(self, one, a):
        moved = np.full_like(a, -1)
        for source, target in read_permute_pairs(one):
            moved[target] = a[source]
        return moved
