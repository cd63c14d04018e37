"""Simulation and inference: fluids, molecules, graphs, differential equations, spectra, sampling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.real_programs.base import Case, P, Scale, constrain, program, shaped, shardings_of


@program("jaxdecomp", "cpu")
def jaxdecomp_poisson(scale: Scale) -> Case:
    """A Poisson solver with jaxdecomp's 3-D FFT by pencils, there and back."""
    import jaxdecomp

    mesh, n = scale.mesh(z=2, y=4), scale.pick(32, 256)
    a = shaped(mesh, P("z", "y"), (n, n, n), jnp.complex64)

    def solve(a: Any) -> Any:
        spectrum = jaxdecomp.fft.pfft3d(a)
        kx, ky, kz = jaxdecomp.fft.fftfreq3d(spectrum)
        k2 = kx**2 + ky**2 + kz**2
        return jaxdecomp.fft.pifft3d(spectrum / jnp.where(k2 == 0, 1.0, -k2))

    return Case(solve, (a,), {"out_shardings": a.sharding})


@program("jax-cfd")
def cfd_navier_stokes(scale: Scale) -> Case:
    """jax-cfd: three steps of 2-D incompressible flow by finite volumes, split by rows and columns."""
    import jax_cfd.base as cfd

    mesh, n = scale.mesh(y=2, x=4), scale.pick(64, 1024)
    grid = cfd.grids.Grid((n, n), domain=((0, 6.28), (0, 6.28)))
    conditions = cfd.boundaries.periodic_boundary_conditions(2)
    step = cfd.equations.semi_implicit_navier_stokes(
        density=1.0, viscosity=1e-3, dt=1e-3, grid=grid, pressure_solve=cfd.pressure.solve_fast_diag
    )
    u = shaped(mesh, P("y", "x"), (n, n))

    def run(u: Any, v: Any) -> Any:
        arrays = [cfd.grids.GridArray(one, offset, grid) for one, offset in zip((u, v), grid.cell_faces, strict=True)]
        velocity = tuple(cfd.grids.GridVariable(one, conditions) for one in arrays)
        for _ in range(3):
            velocity = step(velocity)
        return tuple(constrain(one.data, mesh, "y", "x") for one in velocity)

    return Case(run, (u, u))


@program("jax-cfd")
def cfd_spectral(scale: Scale) -> Case:
    """jax-cfd: 2-D turbulence by a spectral method, its vorticity split by rows."""
    import jax_cfd.base as cfd
    from jax_cfd import spectral

    mesh, n = scale.mesh(x=8), scale.pick(64, 1024)
    grid = cfd.grids.Grid((n, n), domain=((0, 6.28), (0, 6.28)))
    equation = spectral.equations.NavierStokes2D(1e-3, grid, smooth=True)
    step = spectral.time_stepping.crank_nicolson_rk4(equation, 1e-3)
    w = shaped(mesh, P("x", None), (n, n))

    def run(w: Any) -> Any:
        spectrum = constrain(jnp.fft.rfftn(w), mesh, "x", None)
        spectrum = jax.lax.fori_loop(0, 2, lambda _, s: constrain(step(s), mesh, "x", None), spectrum)
        return constrain(jnp.fft.irfftn(spectrum), mesh, "x", None)

    return Case(run, (w,))


@program("jax-md")
def md_lennard_jones(scale: Scale) -> Case:
    """jax-md: two steps of molecular dynamics of Lennard-Jones particles, split over all devices."""
    from jax_md import energy, simulate, space

    mesh, n = scale.mesh(x=8), scale.pick(128, 4096)
    displacement, shift = space.periodic(20.0)
    potential = energy.lennard_jones_pair(displacement)
    _, apply = simulate.nve(lambda r: potential(r), shift, 1e-4)
    r = shaped(mesh, P("x", None), (n, 3))

    def run(r: Any, v: Any, f: Any) -> Any:
        state = simulate.NVEState(1000 * r, v, f, jnp.float32(1.0))
        for _ in range(2):
            state = apply(state)
            state = state.set(position=constrain(state.position, mesh, "x", None))
        return state.position, state.velocity, state.force

    return Case(run, (r, r, r), {"out_shardings": (r.sharding,) * 3})


@program("jraph")
def jraph_network(scale: Scale) -> Case:
    """jraph: gradients of a graph network whose nodes and edges are split over all devices."""
    import jraph

    mesh = scale.mesh(x=8)
    nodes, edges, width = scale.pick(128, 8192), scale.pick(512, 65536), scale.pick(16, 128)
    x = shaped(mesh, P("x", None), (nodes, width))
    e = shaped(mesh, P("x", None), (edges, width))
    ends = shaped(mesh, P("x"), (edges,), jnp.int32)
    w = shaped(mesh, P(), (3, width, width))

    def forward(w: Any, x: Any, e: Any, senders: Any, receivers: Any) -> Any:
        graph = jraph.GraphsTuple(x, e, receivers, senders, None, jnp.array([nodes]), jnp.array([edges]))

        def on_edges(e: Any, sent: Any, received: Any, _: Any) -> Any:
            return constrain(jax.nn.relu((e + sent + received) @ w[0]), mesh, "x", None)

        def on_nodes(x: Any, sent: Any, received: Any, _: Any) -> Any:
            return constrain(jax.nn.relu(x @ w[1] + (sent + received) @ w[2]), mesh, "x", None)

        network = jraph.GraphNetwork(on_edges, on_nodes)
        return jnp.mean(network(network(graph)).nodes ** 2)

    return Case(jax.grad(forward), (w, x, e, ends, ends), {"out_shardings": w.sharding}, nodes - 1)


@program("diffrax")
def diffrax_heat(scale: Scale) -> Case:
    """diffrax: the heat equation on a plane split by rows and columns, with adaptive steps."""
    import diffrax

    mesh, n = scale.mesh(y=2, x=4), scale.pick(32, 1024)
    a = shaped(mesh, P("y", "x"), (n, n))

    def slope(t: Any, a: Any, args: Any) -> Any:
        return sum(jnp.roll(a, by, dim) for by in (1, -1) for dim in (0, 1)) - 4 * a

    def run(a: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(slope), diffrax.Tsit5(), 0.0, 0.5, 0.1, a, max_steps=16, throw=False,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
        )  # fmt: skip
        return constrain(solution.ys, mesh, None, "y", "x")

    return Case(run, (a,))


@program("diffrax")
def diffrax_neural_ode(scale: Scale) -> Case:
    """diffrax: gradients of a neural ODE on a batch, with its weights split over devices."""
    import diffrax

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)
    x = shaped(mesh, P("data", None), (scale.pick(16, 512), width))
    w = [shaped(mesh, P(None, "model"), (width, 2 * width)), shaped(mesh, P("model", None), (2 * width, width))]

    def loss(w: Any, x: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, w: constrain(jnp.tanh(y @ w[0]) @ w[1], mesh, "data", None))
        solution = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 0.25, x, args=w, max_steps=8)
        return jnp.mean(solution.ys**2)

    return Case(jax.grad(loss), (w, x), {"out_shardings": shardings_of(w)})


@program("numpyro")
def numpyro_hmc(scale: Scale) -> Case:
    """numpyro: steps of Hamiltonian Monte Carlo for a logistic regression whose data is split over devices."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMC
    from numpyro.infer.util import potential_energy

    mesh = scale.mesh(data=2, model=4)
    rows, width = scale.pick(128, 8192), scale.pick(64, 2048)
    x = shaped(mesh, P("data", "model"), (rows, width))
    y = shaped(mesh, P("data"), (rows,), jnp.int32)
    start = shaped(mesh, P("model"), (width,))

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def run(x: Any, y: Any, start: Any) -> Any:
        kernel = HMC(potential_fn=lambda z: potential_energy(model, (x, y), {}, z), step_size=0.01, num_steps=4)
        state = kernel.init(jax.random.key(0), 0, {"w": start}, (), {})
        for _ in range(2):
            state = kernel.sample(state, (), {})
        return constrain(state.z["w"], mesh, ("data", "model"))

    return Case(run, (x, y, start), {"out_shardings": NamedSharding(mesh, P(("data", "model")))}, 1)


@program("blackjax")
def blackjax_chains(scale: Scale) -> Case:
    """blackjax: many chains split over devices, with statistics over all of them by parameter."""
    import blackjax

    mesh = scale.mesh(chain=8)
    chains, width = scale.pick(32, 512), scale.pick(64, 1024)
    start = shaped(mesh, P("chain", None), (chains, width))

    def run(start: Any) -> Any:
        sampler = blackjax.hmc(lambda z: -jnp.sum(z**2), 0.1, jnp.ones(width), 3)
        state = jax.vmap(sampler.init)(start)
        for key in jax.random.split(jax.random.key(0), 2):
            state, _ = jax.vmap(sampler.step)(jax.random.split(key, chains), state)
        draws = constrain(state.position, mesh, None, "chain")
        return draws.mean(0), draws.std(0), jnp.sort(draws, axis=0)[chains // 2]

    return Case(run, (start,))


@program("s2fft")
def s2fft_maps(scale: Scale) -> Case:
    """s2fft: spherical transforms of many maps, whose spectra are then filtered by degree."""
    import s2fft

    mesh, degree, maps = scale.mesh(x=8), scale.pick(8, 32), scale.pick(16, 32)
    f = shaped(mesh, P("x", None, None), (maps, degree, 2 * degree - 1), jnp.complex64)

    def run(f: Any) -> Any:
        spectra = jax.vmap(lambda one: s2fft.forward_jax(one, degree))(f)
        spectra = constrain(spectra, mesh, None, "x", None)
        filtered = spectra - spectra.mean(0)
        return constrain(filtered * jnp.arange(degree)[:, None], mesh, "x", None, None)

    return Case(run, (f,))
