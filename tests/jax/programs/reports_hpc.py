"""Public reports from scientific computing, rebuilt around the reshard that each names; shapes scaled down.

Most are complex, as theirs are (complex64 here: no x64 mode), on the mesh that the devices here allow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, ordinal, program, programs_in, put

LORRAX = "https://github.com/jackmcarthur/lorrax"


@program(
    "lorrax-wsolve",
    f"a batched solve: matrix faces over the grid to one matrix a device and back, {LORRAX}",
    remat=True,
    x=4,
    y=2,
)
def lorrax_wsolve(mesh: Mesh) -> Case:
    face, batch = NamedSharding(mesh, P(None, "x", "y")), NamedSharding(mesh, P(("x", "y")))

    def f(v, chi):
        v, chi = with_sharding_constraint(v, batch), with_sharding_constraint(chi, batch)
        matrix = jnp.eye(v.shape[1]) - v @ chi
        inverse = jnp.broadcast_to(jnp.eye(v.shape[1], dtype=v.dtype), v.shape)
        for _ in range(6):  # Newton's iteration: products alone
            inverse = 2 * inverse - inverse @ matrix @ inverse
        return with_sharding_constraint(inverse @ v, face)

    args = tuple(
        put(mesh, normal(seed, 8, 12, 12, dtype=np.complex64, scale=0.15), None, "x", "y") for seed in range(2)
    )
    return Case(f, args, {"donate_argnums": 1, "out_shardings": face}, tolerance=1e-4)


@program(
    "lorrax-xy-swap",
    f"one dim from axis y to axis x beside a transpose, padded and conjugated, {LORRAX}",
    remat=True,
    x=4,
    y=2,
)
def lorrax_xy_swap(mesh: Mesh) -> Case:
    by_y, by_x = NamedSharding(mesh, P(None, None, None, "y")), NamedSharding(mesh, P(None, "x"))

    def f(psi):  # k, band, spinor, mu
        psi = jnp.pad(psi, ((0, 0), (0, 0), (0, 0), (0, 2)))
        psi = with_sharding_constraint(psi, by_y)
        turned = with_sharding_constraint(jnp.conj(psi.transpose(0, 3, 1, 2)), by_x)
        return psi, turned

    args = (put(mesh, normal(0, 3, 8, 2, 14, dtype=np.complex64), None, ("x", "y")),)
    return Case(f, args, tolerance=0)


@program("lorrax-bse", f"excitons over all devices to mesh points over y, summed, {LORRAX}", remat=True, x=4, y=2)
def lorrax_bse(mesh: Mesh) -> Case:
    points = NamedSharding(mesh, P(None, None, None, "y"))

    def f(psi, w):
        rho = with_sharding_constraint(psi, points)
        rho = jnp.einsum("qcsm,qdsm->qcdm", rho.conj(), rho)
        return with_sharding_constraint(rho @ w, NamedSharding(mesh, P(("x", "y"))))

    args = (put(mesh, normal(0, 8, 3, 2, 8, dtype=np.complex64), ("x", "y")), put(mesh, normal(1, 8, 8), "y"))
    return Case(f, args)


@program(
    "lorrax-vq",
    f"a stack read with its first dim over all devices, wanted with dim 1 over x, {LORRAX}",
    remat=True,
    x=4,
    y=2,
)
def lorrax_vq(mesh: Mesh) -> Case:
    rows = NamedSharding(mesh, P(None, "x"))

    def f(zeta, coulomb):
        zeta = with_sharding_constraint(zeta, rows) * jnp.sqrt(coulomb)
        return with_sharding_constraint(
            jnp.einsum("qmg,qng->qmn", zeta, zeta.conj()), NamedSharding(mesh, P(None, "x", "y"))
        )

    args = (put(mesh, normal(0, 8, 8, 12, dtype=np.complex64), ("x", "y")), put(mesh, np.abs(normal(1, 12))))
    return Case(f, args)


@program("lorrax-uneven", f"a dim of 20 that 4 divides and 8 does not, from x to (x, y), {LORRAX}", x=4, y=2)
def lorrax_uneven(mesh: Mesh) -> Case:
    coarse, fine = NamedSharding(mesh, P(None, None, "x")), NamedSharding(mesh, P(None, None, ("x", "y")))

    def f(a):
        a = with_sharding_constraint(a * 2, coarse)
        return jnp.sum(with_sharding_constraint(a, fine), axis=0)

    args = (put(mesh, ordinal(3, 6, 20, dtype=np.complex64), None, None, "x"),)
    return Case(f, args)


@program("lorrax-galerkin", f"a replicated dim merged with a sharded minor one before a product, {LORRAX}", x=4, y=2)
def lorrax_galerkin(mesh: Mesh) -> Case:
    columns = NamedSharding(mesh, P(None, ("x", "y")))

    def f(basis, psi, q):
        k, b, s, r = psi.shape
        flat = psi.reshape(k * b, s * r)
        return q + with_sharding_constraint(basis @ flat, columns)

    args = (
        put(mesh, normal(0, 5, 12, dtype=np.complex64)),
        put(mesh, normal(1, 3, 4, 2, 16, dtype=np.complex64), None, "x", None, "y"),
        put(mesh, normal(2, 5, 32, dtype=np.complex64), None, ("x", "y")),
    )
    return Case(f, args, {"donate_argnums": 2, "out_shardings": columns})


@program(
    "dnsjax-snapshot",
    "a flow's state from the solver's layout to the file's and back, an odd dim padded, explicit axes, "
    "https://github.com/gokhanyalniz/dnsjax",
    remat=True,
    explicit=True,
    np0=4,
    np1=2,
)
def dnsjax_snapshot(mesh: Mesh) -> Case:
    solver, file = (
        NamedSharding(mesh, P(None, None, "np0", "np1")),
        NamedSharding(mesh, P(None, ("np0", "np1"), None, None)),
    )

    def f(state):
        padded = jnp.pad(state, ((0, 0), (0, 3), (0, 0), (0, 0)))
        written = jax.sharding.reshard(padded, file)
        read = jax.sharding.reshard(2 * written, solver)
        return written, read[:, :13]

    args = (put(mesh, ordinal(3, 13, 8, 4, dtype=np.complex64), *solver.spec),)
    return Case(f, args, tolerance=0)


@program(
    "enzyme-822",
    "halos padded around broadcast profiles of a 2x2 ocean grid, https://github.com/EnzymeAD/Enzyme-JAX/issues/822",
    x=2,
    y=2,
)
def enzyme_822(mesh: Mesh) -> Case:
    field = NamedSharding(mesh, P(None, "y", "x"))
    along_x = NamedSharding(mesh, P("x"))

    def f(c, profile):
        lengths = jnp.pad(with_sharding_constraint(jnp.cos(profile), NamedSharding(mesh, P("y"))), (8, 8), mode="wrap")
        lengths = with_sharding_constraint(lengths, along_x)
        c = jnp.pad(c, ((0, 0), (8, 8), (8, 8)), mode="wrap")
        flux = (c[:, :, 1:] - c[:, :, :-1])[:, 8:-8, 7:-8] * lengths[8:-8]
        return with_sharding_constraint(c[:, 8:-8, 8:-8] + 0.1 * flux, field)

    args = (put(mesh, normal(0, 4, 16, 16), None, "y", "x"), put(mesh, normal(1, 16), "y"))
    return Case(f, args)


PROGRAMS = programs_in(vars())
