"""The pass inside XLA: programs are better with it, right, and never worse; without the hook it says so."""

import threading
from types import SimpleNamespace

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
from reshard.errors import PlanError, ReshardError
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.fragments import Fragments
from reshard.jax.xla_pass.measured_programs import read_executable


def mesh():
    return JaxMesh(np.array(jax.devices()).reshape(2, 4), ("y", "x"))


def shardings():
    here = mesh()
    return NamedSharding(here, P("y", None, "x")), NamedSharding(here, P(None, ("x", "y"), None))


def step(a):
    """jax-ml/jax#21562: XLA gathers the whole sum on every device, and slices it."""
    return jnp.sqrt(jnp.abs(jax.lax.with_sharding_constraint(a + a, shardings()[1])))


def argument(dtype="float32", size=64):
    return jax.ShapeDtypeStruct((size,) * 3, dtype, sharding=shardings()[0])


def compiled(f, *args, **options):
    return jax.jit(lambda *a: f(*a), **options).lower(*args).compile()


def received(program):
    return hlo.traffic(hlo.parse(program.as_text())).received_bytes


def both(f, *args):
    """The program without the pass and with it, and the pass's report."""
    plain = compiled(f, *args)
    with reshard.jax.enabled() as log:
        ours = compiled(f, *args)
    return plain, ours, log


def test_a_rebuilt_array():
    plain, ours, log = both(step, argument())
    (report,) = log.reports
    assert report.changed and report.saved_bytes == received(plain) - received(ours)
    tile = 64**3 * 4 // 8
    assert received(plain) == 8 * tile - tile and received(ours) == tile * 7 // 8
    temp = [one.memory_analysis().temp_size_in_bytes for one in (plain, ours)]
    assert temp[1] < temp[0] / 4
    data = jax.device_put(np.random.default_rng(0).normal(size=(64, 64, 64)).astype("float32"), shardings()[0])
    assert np.asarray(plain(data)).tobytes() == np.asarray(ours(data)).tobytes()


@pytest.mark.fast(1)
@pytest.mark.parametrize("dtype", ["int8", "int32", "bfloat16", "float64", "complex64"])
def test_dtypes(dtype):
    with jax.enable_x64(True):
        f = lambda a: jax.lax.with_sharding_constraint(a + a, shardings()[1]) + 1  # noqa: E731
        plain, ours, _ = both(f, argument(dtype, 16))
        assert received(ours) <= received(plain)
        data = jax.device_put(jnp.arange(16**3).reshape(16, 16, 16).astype(dtype), shardings()[0])
        assert np.asarray(plain(data)).tobytes() == np.asarray(ours(data)).tobytes()


def loop(a):
    before, after = shardings()

    def turn(carry, _):
        moved = jax.lax.with_sharding_constraint(carry * 2, after)
        return jax.lax.with_sharding_constraint(moved + 1, before), None

    return jax.lax.scan(turn, a, None, length=3)[0]


def branch(a):
    before, after = shardings()
    constrain = jax.lax.with_sharding_constraint

    def moved(x):
        return constrain(constrain(x + 1, after) * 2, before)

    return jax.lax.cond(a[0, 0, 0] > 0, moved, lambda x: x, a)


@pytest.mark.fast(1)
@pytest.mark.parametrize("f", [loop, branch])
def test_chains_inside_loops_and_branches(f):
    plain, ours, log = both(f, argument())
    assert any(place.replaced for report in log.reports for place in report.places)
    assert received(ours) < received(plain) / 2
    data = jax.device_put(np.random.default_rng(1).normal(size=(64, 64, 64)).astype("float32"), shardings()[0])
    assert np.asarray(plain(data)).tobytes() == np.asarray(ours(data)).tobytes()


def test_constants_keep_their_bits():
    """XLA's text would lose the sign of zero and leave the table out."""
    table = np.linspace(-1, 1, 64).astype("float32")
    table[0] = -0.0

    def f(a):
        return jax.lax.with_sharding_constraint(a, shardings()[1]) * table

    plain, ours, log = both(f, argument())
    assert log.reports[0].changed
    data = jax.device_put(np.ones((64, 64, 64), "float32"), shardings()[0])
    result = np.asarray(ours(data))
    assert result.tobytes() == np.asarray(plain(data)).tobytes()
    assert np.signbit(result[0, 0, 0])


def test_the_same_module_is_searched_once(monkeypatch):
    searched, search = [], xla_hook.improve_module

    def improve_module(module, *options):
        searched.append(module)
        return search(module, *options)

    monkeypatch.setattr(xla_hook, "improve_module", improve_module)
    with reshard.jax.enabled() as log:
        programs = [compiled(step, argument(size=size)).as_text() for size in (24, 24, 40)]
    assert programs[0] == programs[1] != programs[2] and len(searched) == 2
    assert log.reports[0].places == log.reports[1].places and log.reports[1].changed


def test_a_program_without_collectives_is_left_alone():
    with reshard.jax.enabled() as log:
        assert float(jax.jit(lambda x: 3 * x)(2.0)) == 6.0
    assert not log.reports and "no module" in str(log)


def test_caches_do_not_mix_programs():
    """One jitted function runs its plain program outside of the context, and the better one inside."""
    f = jax.jit(step)
    data = jax.device_put(np.ones((64, 64, 64), "float32"), shardings()[0])
    f(data)
    with reshard.jax.enabled() as log:
        f(data)
        f(data)
        assert len(log.reports) == 1 and log.reports[0].changed
    f(data)
    assert len(log.reports) == 1


@pytest.mark.slow
def test_enable_holds_for_the_process_and_all_threads():
    log = reshard.jax.enable()
    try:
        thread = threading.Thread(target=compiled, args=(step, argument()))
        thread.start()
        thread.join()
        compiled(step, argument())
        assert [report.changed for report in log.reports] == [True, True]
    finally:
        reshard.jax.disable()
    compiled(step, argument())
    assert len(log.reports) == 2


def test_a_failure_leaves_the_program_as_it_was(monkeypatch):
    def fails(*_):
        raise KeyError("planted")

    monkeypatch.setattr(xla_hook, "improve_module", fails)
    plain, ours, log = both(step, argument())
    assert received(plain) == received(ours)
    assert "planted" in log.reports[0].why and "left as it was" in str(log)


def test_a_budget_that_no_plan_meets_leaves_the_chain():
    with reshard.jax.enabled(budget=1) as log:
        compiled(step, argument())
    assert not log.reports[0].changed and "budget" in log.reports[0].places[0].why_left


@pytest.mark.slow
def test_a_budget_that_cuts_a_plan_into_a_loop():
    """The loop over its rounds is followed turn by turn, so that it may take the chain's place."""
    plain = compiled(step, argument())
    with reshard.jax.enabled(budget=270_000) as log:  # 256 KiB are source and target
        better = compiled(step, argument())
    assert log.reports[0].changed and " while(" in better.as_text() and received(better) == 114_688
    data = jax.device_put(np.random.default_rng(0).normal(size=(64, 64, 64)).astype("float32"), shardings()[0])
    assert np.array_equal(plain(data), better(data))


def test_options_are_checked_at_once():
    with pytest.raises(ReshardError, match="no-such-network"):
        reshard.jax.enable(network="no-such-network")
    with pytest.raises(ReshardError, match="budget 'much'"):
        reshard.jax.enable(budget="much")
    with pytest.raises(ReshardError, match="network 3 is not a Network"):
        reshard.jax.enable(network=3)


def product(axes, target):
    """A matrix product whose contracted dim is split over `axes`: each device has a summand."""

    def run(a, b):
        return jax.lax.with_sharding_constraint(a @ b, NamedSharding(mesh(), P(*target)))

    return run, NamedSharding(mesh(), P(None, axes)), NamedSharding(mesh(), P(axes))


def test_a_sum_that_has_to_be_packed_needs_no_more_than_a_sum_of_its_own_buffer():
    """Scattered along the minor dim, it needs a copy in the order of the pieces; XLA:CPU sums into another buffer."""
    run, left, right = product(("y", "x"), (None, ("y", "x")))
    arrays = [jax.device_put(jnp.ones((128, 128)), sharding) for sharding in (left, right)]
    plain, ours, log = both(run, *arrays)
    assert [len(report.replaced) for report in log.reports] == [1] and received(ours) * 2 == received(plain)
    temps = [one.memory_analysis().temp_size_in_bytes for one in (plain, ours)]
    assert temps[1] <= temps[0] and np.array_equal(plain(*arrays), ours(*arrays))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("axes", "target", "dtype"),
    [
        ("x", ("x",), "float32"),
        (("y", "x"), (("x", "y"),), "float32"),
        ("x", ("x", "y"), "bfloat16"),
        ("y", (None, "y"), "int32"),
    ],
)
def test_a_sum_that_is_sliced_is_scattered(axes, target, dtype):
    """The same bits, although the summands are of very different sizes."""
    run, left, right = product(axes, target)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(128, 128)) * np.exp2(rng.integers(-12, 12, (128, 128))) for _ in range(2)]
    arrays = [
        jax.device_put(jnp.asarray(one).astype(dtype), sharding)
        for one, sharding in zip(values, (left, right), strict=True)
    ]
    plain, ours, log = both(run, *arrays)
    (report,) = log.reports
    assert report.replaced and not report.why
    assert "reduce-scatter" in ours.as_text() and "reduce-scatter" not in plain.as_text()
    assert received(ours) < received(plain)
    assert np.asarray(plain(*arrays)).tobytes() == np.asarray(ours(*arrays)).tobytes()


@pytest.mark.slow
def test_bf16_is_replaced_although_cpu_sends_it_as_f32():
    a = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(64,) * 3)).astype("bfloat16"), shardings()[0])
    plain, ours, log = both(step, a)
    assert [len(report.replaced) for report in log.reports] == [1]
    assert received(ours) < received(plain)
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()


def test_one_element_does_not_take_a_gather_of_the_array():
    def run(a):
        return jnp.where(a.reshape(-1)[0] > 0, a + 1, a * 2)

    sharding = NamedSharding(mesh(), P(None, "x"))
    a = jax.device_put(np.random.default_rng(0).normal(size=(16,) * 3).astype("float32"), sharding)
    plain, ours, log = both(run, a)
    assert received(plain) > 10_000
    assert received(ours) == 3 * 4 and log.reports[0].replaced
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()


@pytest.mark.parametrize(
    ("axes", "target", "dtype", "kept"),
    [
        ("x", ("x",), "float32", False),
        ("y", ("y",), "float32", True),  # two summands have one order
        ("x", ("x",), "int32", True),
    ],
)
def test_sums_of_floats_stay_between_processes(monkeypatch, axes, target, dtype, kept):
    """Gloo adds up a reduce-scatter in another order than an all-reduce, on the devices of one process too."""
    monkeypatch.setattr(Fragments, "processes", 2)
    run, left, right = product(axes, target)
    _, _, log = both(run, argument_of(left, dtype), argument_of(right, dtype))
    (report,) = log.reports
    assert bool(report.replaced) == kept, str(report)
    said = reshard.jax.report(run)(argument_of(left, dtype), argument_of(right, dtype)).places[0]
    for why in (report.places[0].why_left, said.why_left):
        assert bool(why) != kept and (kept or "another algorithm runs between processes" in why)


def argument_of(sharding, dtype):
    return jax.ShapeDtypeStruct((128, 128), dtype, sharding=sharding)


def test_all_processes_of_the_platform_count():
    """What adds up sums is chosen for all of them, also for a program on the devices of one."""
    devices = [SimpleNamespace(process_index=number) for number in (0, 0, 1)]
    for one in devices:
        one.client = SimpleNamespace(devices=lambda: devices)
    assert Fragments(devices[:2]).processes == 2 and Fragments(jax.devices()).processes == 1


@pytest.mark.parametrize(
    ("compute", "stays"),
    [
        (lambda x: x * x + x, "add"),
        (jnp.tanh, "tanh"),
        (lambda x: jnp.sqrt(jnp.abs(x - 1) / 3) * x, ""),
    ],
)
def test_what_may_round_anew_stays_where_bits_must_be_the_same(compute, stays):
    """XLA:CPU contracts products and sums in one loop and not in the next: here 20% and 40% of the bits changed."""
    here = mesh()
    before, after = NamedSharding(here, P("x", "y")), NamedSharding(here, P(None, None, ("y", "x")))
    data = jax.device_put(np.random.default_rng(1).normal(size=(24,) * 3).astype("float32") * 4, before)

    def run(a):
        return compute(jax.lax.with_sharding_constraint(a + a, after))

    plain = compiled(run, data)
    with reshard.jax.enabled(same_bits=True) as log:
        ours = compiled(run, data)
    (report,) = log.reports
    assert bool(report.replaced) == (not stays), str(report)
    assert not stays or (f"{stays}" in str(report) and "may be rounded in another way" in str(report))
    assert np.asarray(plain(data)).tobytes() == np.asarray(ours(data)).tobytes()


def test_the_peak_does_not_rise_as_compiled():
    """It rose by 20%."""
    here = JaxMesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    def put(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(here, P(*spec)))

    def run(a):
        return put(jnp.einsum("abc,cd->abd", put(a, None, "x", "y"), table), "x")

    table = np.arange(32 * 32, dtype="float32").reshape(32, 32) / 100
    data = jax.ShapeDtypeStruct((32,) * 3, "float32", sharding=NamedSharding(here, P(None, None, ("x", "y"))))
    plain, ours, log = both(run, data)
    peaks = [read_executable(one.runtime_executable()).peak_bytes for one in (plain, ours)]
    assert peaks[1] <= peaks[0] and received(ours) <= received(plain), str(log)


def test_the_order_of_sums_is_one_of_two_through_every_door():
    text = "HloModule m\n\nENTRY %main {\n  ROOT %p = f32[] parameter(0)\n}"
    doors = (
        reshard.jax.enable,
        lambda sums: reshard.jax.jit(abs, sums=sums),
        lambda sums: reshard.jax.report(abs, sums=sums)(1.0),
        lambda sums: examine(text, sums=sums),
    )
    for door in doors:
        with pytest.raises(ReshardError, match=r"sums='sorted' is none of 'exact', 'any order'"):
            door(sums="sorted")
    with (
        pytest.raises(ReshardError, match=r"same_bits=True forbids that"),
        reshard.jax.enabled(same_bits=True, sums="any order"),
    ):
        pass
    assert [examine(text, sums=each).reorder_bytes for each in ("exact", "any order")] == [0, 0]


def test_no_preference_is_no_preference_of_the_pass():
    """A plan may have none; the pass must know what to make better."""
    for switch in (reshard.jax.enable, lambda **options: reshard.jax.jit(abs, **options)):
        with pytest.raises(PlanError, match=r"prefer=None is none of 'bytes', 'memory', 'time'"):
            switch(prefer=None)
