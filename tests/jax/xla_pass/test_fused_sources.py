"""Moves whose source exists only inside fusions: a fusion of its own yields it, and the plan moves that."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard.doctor import examine
from reshard.errors import SpliceError
from reshard.hlo import integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Splicer
from reshard.jax.program_report import optimized_text


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def put(a, *spec):
    return jax.lax.with_sharding_constraint(a, on(mesh(), *spec))


def step(a, w):
    """The square is fused with the slices that are sent; the product of matrices has the program's peak."""
    squared = a * a + 1
    return put(squared.transpose(1, 0, 2), "y", "x") + squared, w @ w @ w


def lower_step():
    a = jax.ShapeDtypeStruct((16, 16, 8), "float32", sharding=on(mesh(), "y", "x"))
    w = jax.ShapeDtypeStruct((256, 256), "float32", sharding=on(mesh()))
    return jax.jit(lambda *args: step(*args)).lower(a, w)


def places_of(log):
    return [place for report in log.reports for place in report.places]


def test_a_value_that_only_fusions_have_is_moved():
    plain = lower_step().compile()
    with reshard.jax.enabled() as log:
        ours = lower_step().compile()
    (place,) = places_of(log)
    assert (place.received_bytes, place.planned_bytes, place.why_left) == (1536, 1024, "")
    rng = np.random.default_rng(0)
    args = [rng.standard_normal((16, 16, 8)).astype("float32"), np.eye(256, dtype="float32")]
    args = [jax.device_put(*each) for each in zip(args, plain.input_shardings[0], strict=True)]
    for one, other in zip(plain(*args), ours(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    (place,) = examine(optimized_text(plain)).places
    assert place.planned_bytes == 1024  # the doctor says what the pass does


def test_it_stays_where_bits_must():
    """A product that is added to something is rounded in one loop and not in another."""
    with reshard.jax.enabled(same_bits=True) as log:
        lower_step().compile()
    (place,) = places_of(log)
    assert place.why_left.endswith("would be computed in a fusion of its own, and may be rounded in another way")


@pytest.fixture(scope="module")
def checked():
    """The modules and the changes that the pass hands to its check."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        check = integrity.check_splices
        patch.setattr(integrity, "check_splices", lambda *args: (found.append(args), check(*args)))
        with reshard.jax.enabled():
            lower_step().compile()
    return found[-1]


def planted(checked, change):
    """The rewritten module with something changed in the new fusion."""
    old, new, changes, exposed = checked
    new = ModuleProto.decode(b"".join([new.encode()]))
    ((value, name),) = exposed.items()
    region = new.computation_named(value.region)
    made = region.named(name)
    change(region, made, new.computation(made.called[0]))
    return old, ModuleProto.decode(new.encode()), changes, exposed


def test_the_check_lets_the_new_fusion_through(checked):
    integrity.check_splices(*planted(checked, lambda region, made, inner: None))


def yield_another_value(region, made, inner):
    inner.root_id = next(one for one in inner.instructions if one.opcode == "multiply").id


def take_another_operand(region, made, inner):
    shape = region.by_id(made.operands[0]).shape
    made.operands = [next(one for one in region.instructions if one.shape == shape and one.id != made.operands[0]).id]


def compute_something_else(region, made, inner):
    next(one for one in inner.instructions if one.opcode == "multiply").opcode = "divide"


def take_another_constant(region, made, inner):
    one = next(one for one in inner.instructions if one.opcode == "constant")
    literal = one.message.data(8)
    one.message.set_data(8, literal[:-1] + bytes([literal[-1] ^ 1]))


def be_a_custom_fusion(region, made, inner):
    made.message.set_data(11, b"kCustom")


@pytest.mark.parametrize(
    "change",
    [yield_another_value, take_another_operand, compute_something_else, take_another_constant, be_a_custom_fusion],
)
def test_the_check_refuses_another_fusion(checked, change):
    with pytest.raises(SpliceError):
        integrity.check_splices(*planted(checked, change))


def test_what_no_loop_makes_is_not_exposed(checked):
    old, *_, exposed = checked
    (value,) = exposed
    module = old.fresh()
    module.computation_named(value.region).named(value.fusion).message.set_data(11, b"kCustom")
    with pytest.raises(SpliceError, match="cannot be made by a fusion of its own"):
        Splicer(module).expose_value(value)
