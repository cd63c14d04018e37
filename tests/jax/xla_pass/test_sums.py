"""Sums between devices: those that XLA combined are opened, and what is spliced into them is checked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from reshard.doctor import examine
from reshard.hlo import splice
from reshard.jax.program_report import optimized_text


def put(a, *spec):
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh(), P(*spec)))


def mesh():
    return JaxMesh(np.array(jax.devices()[:8]).reshape(8), ("d",))


def shapes(*dims, dtype="float32", spec=("d",)):
    sharding = NamedSharding(mesh(), P(*spec))
    return [jax.ShapeDtypeStruct(one, dtype, sharding=sharding) for one in dims]


def data(arguments):
    rng = np.random.default_rng(3)
    return [jax.device_put((8 * rng.normal(size=one.shape)).astype(one.dtype), one.sharding) for one in arguments]


def both(f, arguments, **options):
    """The program plain and with the pass, with its report; their bytes received, and whether their bits are equal."""
    plain = jax.jit(f).lower(*arguments).compile()
    with reshard.jax.enabled(**options) as log:
        ours = jax.jit(lambda *args: f(*args)).lower(*arguments).compile()
    given = data(arguments)
    results = [jax.tree.leaves(one(*given)) for one in (plain, ours)]
    same = all(one.tobytes() == other.tobytes() for one, other in zip(*map(_to_numpy, results), strict=True))
    texts = [optimized_text(one) for one in (plain, ours)]
    return log.reports[-1], texts, [hlo.traffic(hlo.parse(text)).received_bytes for text in texts], same


def _to_numpy(arrays):
    return [np.asarray(one) for one in arrays]


def gradients(kept):
    """Sums of products over the devices, which XLA combines: `kept` of them end in parts, the others are whole."""

    def run(x, y):
        sums = [(x * (at + 1)).T @ y for at in range(4)]
        return [jnp.sqrt(jnp.abs(put(one, "d") if at in kept else put(one))) for at, one in enumerate(sums)]

    return run


@pytest.mark.parametrize("kept", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_arrays_of_a_combined_sum_become_reduce_scatters_and_the_others_stay_combined(kept):
    """The sum of four arrays was left whole, as "not the sum of one array"."""
    report, texts, received, same = both(gradients(kept), shapes((64, 32), (64, 16)))
    each = 2 * 7 * 32 * 16 * 4 // 8
    assert received == [4 * each, 4 * each - len(kept) * each // 2] and same, str(report)
    sums = [[one for one in hlo.parse(text).entry.instructions if one.opcode == "all-reduce"] for text in texts]
    assert [[len(one.operands) for one in each] for each in sums] == [[4], [4 - len(kept)] * (len(kept) < 4)]
    said = examine(texts[0])
    assert (said.saved_bytes, said.wasted_bytes) == (received[0] - received[1],) * 2
    assert (said.reached_bytes, said.needed_bytes, said.received_bytes) == (received[1], received[1], received[0])
    assert sum(place.total_bytes for place in said.places) == said.received_bytes
    assert sum(one.launches for place in said.places for one in place.collectives) == said.traffic.launches == 1


def mistaken(edit):
    """`shrink_sums`, with a mistake made in what it leaves of a sum."""
    own = splice.shrink_sums

    def shrink(computation, schedule):
        own(computation, schedule)
        for one in computation.instructions:
            elements = computation.users(one.id)
            if one.opcode == "all-reduce" and elements:
                edit(one, elements)
                return

    return shrink


def swap_operands(one, _):
    one.operands = one.operands[::-1]


def swap_elements(_, elements):
    elements[0].index, elements[1].index = elements[1].index, elements[0].index


def repeat_an_operand(one, _):
    one.operands = [one.operands[0], *one.operands[:-1]]


def take_the_replaced_array(one, elements):
    one.operands = [*one.operands[:-1], min(one.operands) - 1]


def change_the_group(one, _):
    one.message.remove(93)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (swap_operands, "it has other operands than before"),
        (swap_elements, "it has changed"),
        (repeat_an_operand, "it has other operands than before"),
        (take_the_replaced_array, "it has other operands than before|does not stand before it"),
        (change_the_group, "it has changed"),
    ],
)
def test_a_combined_sum_that_was_shrunk_wrongly_is_refused(monkeypatch, edit, why):
    """The outcome of a module is kept for the process, so each mistake is made in a program of its own."""
    monkeypatch.setattr(splice, "shrink_sums", mistaken(edit))
    report, _, received, same = both(gradients((0,)), shapes((64, 32), (64, 16 + sum(map(ord, edit.__name__)) % 97)))
    assert same and received[0] == received[1] and not report.changed
    assert re.search(why, str(report)), str(report)


# Sums of sums.


def added_up(*axes, kept="", dtype="float32"):
    """Sums along one axis after another of the 2 x 4 mesh, of which each device keeps a part along `kept`."""
    here = JaxMesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))

    def run(a):
        total = a[0]
        for axis in axes:
            total = jax.lax.psum(total, axis)
        for axis in kept:
            size = total.shape[0] // here.shape[axis]
            total = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(axis) * size, size)
        return total * 2

    spec = P(("x", "y"))
    mapped = jax.shard_map(run, mesh=here, in_specs=spec, out_specs=P(tuple(kept) or None), check_vma=False)
    return mapped, [jax.ShapeDtypeStruct((8, 32, 24), dtype, sharding=NamedSharding(here, spec))]


WHOLE = 32 * 24 * 4


@pytest.mark.parametrize(
    ("axes", "kept", "of_whole", "planned"),
    [("xy", "", 2.5, 1.75), ("yx", "", 2.5, 1.75), ("yx", "y", 2.5, 1), ("xy", "xy", 2.5, 7 / 8)],
)
def test_sums_of_sums_keep_their_order_and_receive_as_much_as_one(axes, kept, of_whole, planned):
    """They were taken for two sums, each of which receives no more than it needs."""
    f, arguments = added_up(*axes, kept=kept)
    report, texts, received, same = both(f, arguments)
    assert received == [of_whole * WHOLE, planned * WHOLE] and same, str(report)
    assert examine(texts[0]).reached_bytes == received[1]


def test_combined_sums_of_combined_sums_receive_none_of_what_was_replaced():
    """What the second sum takes no more stayed an array of the first one, which was received for nobody."""
    one, (whole,) = added_up("x", "y")
    small = jax.ShapeDtypeStruct((8, 1), "float32", sharding=whole.sharding)
    report, texts, received, same = both(lambda *arrays: [one(each) for each in arrays], [whole, whole, small])
    assert [text.count(" all-reduce(") for text in texts] == [2, 2] and same, str(report)
    assert received == [2 * 2.5 * WHOLE + 10, 2 * 1.75 * WHOLE + 10]


def test_any_order_adds_up_at_once_and_exact_keeps_what_it_may_not(monkeypatch):
    f, arguments = added_up("y", "x")
    report, _, received, same = both(f, arguments, sums="any order")
    (place,) = report.places
    assert place.outcome.steps == ("all_reduce",) and received[1] == 1.75 * WHOLE and not same
    # Between processes a reduce-scatter adds up in another order, so exact leaves it, and says what it would save.
    text = jax.jit(f).lower(*arguments).compile().as_text()
    said = [examine(text, processes=2, sums=sums) for sums in ("exact", "any order")]
    assert [one.reached_bytes for one in said] == [2.5 * WHOLE, 1.75 * WHOLE]
    assert [one.reorder_bytes for one in said] == [0.75 * WHOLE, 0]
    assert "2304 B more would be saved with sums in any order" in str(said[0])
    integers = added_up("y", "x", dtype="int32")
    report, _, received, same = both(*integers)
    assert report.places[0].outcome.steps == ("all_reduce",) and received[1] == 1.75 * WHOLE and same


def test_a_step_of_two_sharded_matrices_wastes_nothing():
    """A third of its bytes: estimates took sums on CPU for sums in place, so that no reduce-scatter seemed to fit."""

    def step(first, second, x, y):
        def loss(weights):
            left, right = (put(one) for one in weights)
            return ((jnp.tanh(x @ left) @ right - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)((first, second))
        return *(put(w - 0.1 * g, "d") for w, g in zip((first, second), gradients, strict=True)), value

    arguments = shapes((128, 256), (256, 128), (64, 128), (64, 128))
    report, texts, received, same = both(step, arguments)
    plain = examine(texts[0])
    assert same and received[1] == plain.needed_bytes == plain.reached_bytes < received[0], str(report)
    assert 3 * plain.needed_bytes < 2.01 * received[0]
