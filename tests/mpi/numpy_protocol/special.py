"""Cases of numpy's functions that random expressions miss: NaN, summands, arrays in different layouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, LayoutError
from reshard.mpi import DistArray
from reshard.types import Layout, Mesh
from tests.mpi.numpy_protocol.arrays import whole
from tests.mpi.numpy_protocol.conformance import distributed
from tests.mpi.worker import Case


def _line(comm: MPI.Intracomm, text: str) -> Layout:
    return Layout.parse(text, Mesh(x=comm.size))


def reductions(comm: MPI.Intracomm) -> Iterator[Case]:
    """Extrema with NaN on one rank only, and reductions of partial arrays."""
    size = 2 * comm.size - 1
    rows = _line(comm, f"f64[{{x}}2/{size}, 3]")

    def nan() -> None:
        for at in range(size):
            for dtype in ("float32", "float64", "complex128"):
                values = np.arange(3.0 * size).reshape(size, 3).astype(dtype)
                values[at, 1] = np.nan
                a = distributed(comm, values, rows)
                for name in ("min", "max"):
                    given, wanted = whole(getattr(a, name)(axis=0)), getattr(values, name)(axis=0)
                    number = getattr(a, name)()
                    # Ranks that differ would go on to different calls, so all of them compare what all have.
                    everywhere = comm.allgather((given, number))
                    assert all(np.array_equal(each, wanted, equal_nan=True) for each, _ in everywhere), (name, at)
                    assert all(np.isnan(each) for _, each in everywhere), (name, everywhere)

    def summands() -> None:
        for reduction, combine in (("sum", np.sum), ("max", np.max), ("product", np.prod)):
            tiles = np.random.default_rng(1).integers(1, 4, (comm.size, 4, 3)).astype(float)
            values = combine(tiles, axis=0)
            a = DistArray(_line(comm, f"f64[4, 3] + {reduction}{{x}}"), tiles[comm.rank], comm)
            for name in ("sum", "prod", "min", "max", "mean", "any"):
                assert np.allclose(whole(getattr(a, name)(axis=0)), getattr(values, name)(axis=0)), (reduction, name)
                assert np.allclose(getattr(a, name)(), getattr(values, name)()), (reduction, name)
            assert np.allclose(np.linalg.norm(a), np.linalg.norm(values))
            assert np.allclose(whole(a @ a.T), values @ values.T)
            assert np.allclose(whole(a[1:, 0]), values[1:, 0])
            assert np.allclose(a[1, 2], values[1, 2])
            assert np.allclose(whole(a.reshape(2, 6)), values.reshape(2, 6))
            assert np.array_equal(a, a)
            assert np.allclose(whole(np.concatenate([a, a])), np.concatenate([values, values]))
            _refused(LayoutError, lambda a=a: a + 1)
            _refused(LayoutError, lambda a=a: a.astype("float32"))

    yield "nan", nan
    yield "summands", summands


def layouts(comm: MPI.Intracomm) -> Iterator[Case]:
    """Operands in different layouts: compared and multiplied by plans, refused by elementwise functions."""
    rows, columns = (_line(comm, text) for text in (f"f64[{{x}}{-(-7 // comm.size)}/7, 4]", "f64[7, 4]"))
    turned = Layout.from_spec(Mesh({"y": comm.size}, device_ids=[*range(comm.size)][::-1]), (7, 4), "float64", ["y"])
    values = np.random.default_rng(2).random((7, 4))

    def compared() -> None:
        a = distributed(comm, values, rows)
        for other in (columns, turned):
            b = distributed(comm, values, other)
            assert np.array_equal(a, b)
            assert np.allclose(a, b)
            if comm.rank == comm.size - 1 or other == turned:
                b.tile[...] += 1
            changed = distributed(comm, values + np.eye(7, 4), other)
            assert not np.array_equal(a, changed)
            assert not np.allclose(a, changed)
            if comm.size > 1:
                _refused(LayoutError, lambda b=b: a + b)

    def multiplied() -> None:
        for one in (rows, columns, turned):
            for other in (rows, columns, turned):
                a, b = distributed(comm, values, one), distributed(comm, values, other)
                assert np.allclose(whole(a.T @ b), values.T @ values)
                assert np.allclose(whole(a @ b.T), values @ values.T)
                assert np.allclose(whole(np.tensordot(a, b, 0)), np.tensordot(values, values, 0))

    def stacked() -> None:
        stack = np.random.default_rng(3).random((3, 4, 5))
        for text in ("f64[{x}N/3, 4, 5]", "f64[3, {x}N/4, 5]", "f64[3, 4, {x}N/5]"):
            sizes = text[: text.index("]")].split("/")[1].split(",")[0]
            layout = _line(comm, text.replace("N", str(-(-int(sizes) // comm.size))))
            a = distributed(comm, stack, layout)
            b = distributed(comm, stack.transpose(0, 2, 1), Layout.from_spec(layout.mesh, (3, 5, 4), "f64", ["x"]))
            assert np.allclose(whole(a @ b), stack @ stack.transpose(0, 2, 1))
            assert np.allclose(whole(b[:1] @ a), stack.transpose(0, 2, 1)[:1] @ stack)
            assert np.allclose(whole(b[0] @ a), stack.transpose(0, 2, 1)[0] @ stack)
            assert np.allclose(whole(np.dot(a, b[1])), np.dot(stack, stack.transpose(0, 2, 1)[1]))

    yield "compared", compared
    yield "multiplied", multiplied
    yield "stacked", stacked


def errors(comm: MPI.Intracomm) -> Iterator[Case]:
    """An error that only one rank's elements cause, before the ranks meet: all raise it, and the next call works."""
    size = comm.size
    rows = _line(comm, f"f32[{{x}}2/{2 * size}, 3]")
    values = np.ones((2 * size, 3), "float32")
    values[-2:] = 3e38

    def negative_powers() -> None:
        """Of integers: numpy refuses them, and so does every rank, one without elements too."""
        layout = _line(comm, f"s64[{{x}}1/{size}]" if size == 1 else f"s64[{{x}}1/{size - 1}]")
        count = layout.shape[0]
        base = distributed(comm, np.arange(1, count + 1), layout)
        exponents = np.zeros(count, np.int64)
        assert np.array_equal(whole(base ** distributed(comm, exponents, layout)), np.ones(count))
        exponents[0] = -1
        negative = distributed(comm, exponents, layout)
        for call in (
            lambda: base**-1,
            lambda: base**negative,
            lambda: 2**negative,
            lambda: np.power(base, np.int8(-2)),
        ):
            _refused(ValueError, call)
        assert np.array_equal(whole(base**-1.0), 1 / np.arange(1, count + 1))
        assert np.array_equal(whole(base.astype("float64") ** negative)[0], 1.0)

    def raised(call: Any) -> None:
        a = distributed(comm, values, rows)
        start = time.monotonic()
        try:
            with np.errstate(over="raise"):
                call(a)
            kinds = comm.allgather("")
        except (FloatingPointError, AgreementError) as error:
            kinds = comm.allgather(str(error))
        assert all("FloatingPointError" in kind for kind in kinds) or size == 1, kinds
        assert len(set(kinds)) == 1, kinds
        assert time.monotonic() - start < 20
        assert np.isclose(float(a.min()), 1)

    calls: dict[str, Any] = {
        "sum": lambda a: a.sum(),
        "prod": lambda a: np.prod(a, axis=0),
        "mean": lambda a: a.mean(),
        "norm": lambda a: np.linalg.norm(a),
        "norm of columns": lambda a: np.linalg.norm(a, 3, axis=0),
        "product": lambda a: a.T @ a,
        "allclose": lambda a: np.allclose(a, -a, 1.5),
    }
    for name, call in calls.items():
        yield name, partial(raised, call)
    yield "negative powers", negative_powers


def _refused(kind: type[Exception], call: Any) -> None:
    try:
        value = call()
    except kind:
        return
    raise AssertionError(f"{value} instead of a {kind.__name__}")
