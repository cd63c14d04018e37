"""Inference, optimization and simulation as libraries ship them: their own solvers, data split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.real_programs.base import Case, P, Scale, fsdp, program, shaped, sharded_like, shardings_of
from benchmarks.real_programs.shipped_models import train


@program("jaxopt")
def jaxopt_lbfgs(scale: Scale) -> Case:
    """jaxopt's L-BFGS on a multiclass logistic regression: examples split over one axis, weights over the other."""
    import jaxopt

    mesh, n, d = scale.mesh(data=4, model=2), scale.pick(256, 65536), scale.pick(64, 1024)
    x = shaped(mesh, P("data", None), (n, d))
    y = shaped(mesh, P("data"), (n,), jnp.int32)
    w = shaped(mesh, P("model", None), (d, 8))
    solver = jaxopt.LBFGS(fun=jaxopt.objective.l2_multiclass_logreg, maxiter=5, jit=True, unroll=False)

    def fit(w: Any, x: Any, y: Any) -> Any:
        return solver.run(w, l2reg=1e-3, data=(x, y)).params

    return Case(fit, (w, x, y), {"out_shardings": w.sharding})


@program("jaxopt")
def jaxopt_projected(scale: Scale) -> Case:
    """jaxopt's projected gradient: the dual of a multiclass support vector machine, examples split over all devices."""
    import jaxopt

    mesh, n, d = scale.mesh(data=8), scale.pick(128, 8192), scale.pick(32, 512)
    x = shaped(mesh, P("data", None), (n, d))
    y = shaped(mesh, P("data", None), (n, 8))
    beta = shaped(mesh, P("data", None), (n, 8))

    def fit(beta: Any, x: Any, y: Any) -> Any:
        project = jax.vmap(jaxopt.projection.projection_simplex)
        solver = jaxopt.ProjectedGradient(
            jaxopt.objective.multiclass_linear_svm_dual, lambda z, _: project(z), maxiter=5, implicit_diff=False
        )
        return solver.run(beta, l2reg=1e3, data=(x, y)).params

    return Case(fit, (beta, x, y), {"out_shardings": beta.sharding})


@program("evosax")
def evosax_open_es(scale: Scale) -> Case:
    """evosax's Open-ES: a population split over all devices, asked, valued and told."""
    from evosax.algorithms import Open_ES

    mesh, people, d = scale.mesh(data=8), scale.pick(64, 1024), scale.pick(256, 16384)
    strategy = Open_ES(population_size=people, solution=jnp.zeros(d))
    params = strategy.default_params
    shapes = jax.eval_shape(lambda: strategy.init(jax.random.key(0), jnp.zeros(d), params))
    state = sharded_like(shapes, lambda path, leaf: P(), mesh)

    def generation(state: Any) -> Any:
        for turn in range(2):
            key = jax.random.key(turn)
            asked, state = strategy.ask(key, state, params)
            asked = jax.lax.with_sharding_constraint(asked, NamedSharding(mesh, P("data", None)))
            value = jnp.sum(100 * (asked[:, 1:] - asked[:, :-1] ** 2) ** 2 + (1 - asked[:, :-1]) ** 2, -1)
            state, _ = strategy.tell(key, asked, value, state, params)
        return state

    return Case(generation, (state,))


@program("evosax")
def evosax_cma(scale: Scale) -> Case:
    """evosax's CMA-ES: a population and the covariance split over devices."""
    from evosax.algorithms import CMA_ES

    mesh, people, d = scale.mesh(data=8), scale.pick(64, 512), scale.pick(32, 512)
    strategy = CMA_ES(population_size=people, solution=jnp.zeros(d))
    params = strategy.default_params
    shapes = jax.eval_shape(lambda: strategy.init(jax.random.key(0), jnp.zeros(d), params))
    state = sharded_like(shapes, fsdp("data"), mesh)
    asked = shaped(mesh, P("data", None), (people, d))

    def tell(state: Any, asked: Any) -> Any:
        return strategy.tell(jax.random.key(0), asked, jnp.sum(asked**2, -1), state, params)[0]

    return Case(tell, (state, asked), {"out_shardings": shardings_of(state)})


@program("ott-jax")
def ott_sinkhorn(scale: Scale) -> Case:
    """OTT's Sinkhorn between two clouds of points, each split over an axis: the cost and its gradient."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    mesh, n = scale.mesh(rows=4, columns=2), scale.pick(128, 4096)
    x = shaped(mesh, P("rows", None), (n, 8))
    y = shaped(mesh, P("columns", None), (n, 8))
    solver = sinkhorn.Sinkhorn(min_iterations=5, max_iterations=5, inner_iterations=5)

    def cost(x: Any, y: Any) -> Any:
        return solver(linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.1))).reg_ot_cost

    return Case(jax.value_and_grad(cost), (x, y), {"out_shardings": (NamedSharding(mesh, P()), x.sharding)})


@program("ott-jax")
def ott_k_means(scale: Scale) -> Case:
    """OTT's k-means of points that are split over all devices."""
    from ott.tools import k_means

    mesh, n = scale.mesh(data=8), scale.pick(256, 65536)
    x = shaped(mesh, P("data", None), (n, 16))

    def find(x: Any) -> Any:
        found = k_means.k_means(
            x, 8, init="random", n_init=1, min_iterations=4, max_iterations=4, rng=jax.random.key(0)
        )
        return found.centroids, found.assignment

    return Case(find, (x,), {"out_shardings": (NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))})


@program("tinygp")
def tinygp_likelihood(scale: Scale) -> Case:
    """tinygp's Gaussian process: the gradient of its likelihood, observations split over all devices."""
    from tinygp import GaussianProcess, kernels

    mesh, n = scale.mesh(data=8), scale.pick(128, 2048)
    x, y = shaped(mesh, P("data"), (n, 2)), shaped(mesh, P("data"), (n,))
    w = {"scale": shaped(mesh, P(), ()), "amplitude": shaped(mesh, P(), ()), "noise": shaped(mesh, P(), ())}

    def loss(w: Any, x: Any, y: Any) -> Any:
        kernel = jnp.exp(w["amplitude"]) * kernels.ExpSquared() + kernels.Matern32(jnp.exp(w["scale"]))
        return -GaussianProcess(kernel, x, diag=0.1 + jnp.exp(w["noise"])).log_probability(y)

    return train(loss, w, (x, y), mesh)


@program("gpjax")
def gpjax_collapsed(scale: Scale) -> Case:
    """GPJax's sparse Gaussian process (its collapsed bound), data split over devices, inducing points whole."""
    import gpjax as gpx
    from flax import nnx

    mesh, n, m = scale.mesh(data=8), scale.pick(256, 16384), 16
    x, y = shaped(mesh, P("data", None), (n, 1)), shaped(mesh, P("data", None), (n, 1))
    likelihood = gpx.likelihoods.Gaussian(num_datapoints=n)
    posterior = likelihood * gpx.gps.Prior(kernel=gpx.kernels.RBF(), mean_function=gpx.mean_functions.Constant())
    family = gpx.variational_families.CollapsedVariationalGaussian(
        posterior=posterior, inducing_inputs=jnp.linspace(-3.0, 3.0, m).reshape(-1, 1)
    )
    graph, state = nnx.split(family)
    leaves, tree = jax.tree.flatten(state)
    w = [shaped(mesh, P(), leaf.shape, leaf.dtype) for leaf in leaves]

    def loss(w: Any, x: Any, y: Any) -> Any:
        return -gpx.objectives.collapsed_elbo(nnx.merge(graph, jax.tree.unflatten(tree, w)), gpx.Dataset(X=x, y=y))

    return Case(jax.value_and_grad(loss), (w, x, y))


@program("flowjax")
def flowjax_autoregressive(scale: Scale) -> Case:
    """flowjax's masked autoregressive flow: a step of maximum likelihood with FSDP."""
    import equinox as eqx
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from paramax import NonTrainable, unwrap

    mesh, d = scale.mesh(data=8), scale.pick(8, 64)
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(d)), flow_layers=4, nn_width=scale.pick(64, 1024)
    )
    kept, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable))
    leaves, tree = jax.tree.flatten(kept)
    weights = sharded_like(dict(zip(map(str, range(len(leaves))), leaves, strict=True)), fsdp("data"), mesh)
    x = shaped(mesh, P("data", None), (scale.pick(64, 4096), d))

    def loss(weights: Any, x: Any) -> Any:
        made = jax.tree.unflatten(tree, [weights[str(at)] for at in range(len(leaves))])
        return -unwrap(eqx.combine(made, static)).log_prob(x).mean()

    return train(loss, weights, (x,), mesh)


@program("jaxley")
def jaxley_network(scale: Scale) -> Case:
    """jaxley: a neuron of four compartments with Hodgkin-Huxley channels, stimuli split over all devices."""
    import jaxley as jx
    from jaxley.channels import HH

    mesh, batch = scale.mesh(data=8), scale.pick(16, 256)
    cell = jx.Cell(jx.Branch(jx.Compartment(), ncomp=4), parents=[-1, 0])
    cell.insert(HH())
    cell[0, 0].record(verbose=False)
    cell.make_trainable("radius", verbose=False)
    params = cell.get_parameters()
    leaves, tree = jax.tree.flatten(params)
    w = [shaped(mesh, P(), leaf.shape, leaf.dtype) for leaf in leaves]
    currents = shaped(mesh, P("data", None), (batch, 40))

    def loss(w: Any, currents: Any) -> Any:
        def one(current: Any) -> Any:
            stimuli = cell[0, 0].data_stimulate(current)
            return jx.integrate(cell, params=jax.tree.unflatten(tree, w), data_stimuli=stimuli)

        return jnp.mean(jax.vmap(one)(currents) ** 2)

    return Case(jax.value_and_grad(loss), (w, currents))


@program("dynamiqs")
def dynamiqs_oscillator(scale: Scale) -> Case:
    """dynamiqs: driven, damped oscillators with amplitudes split over all devices, a master equation each."""
    import dynamiqs as dq

    mesh, n, batch = scale.mesh(data=8), scale.pick(8, 32), scale.pick(16, 128)
    drive = shaped(mesh, P("data"), (batch,))

    def run(drive: Any) -> Any:
        a = dq.destroy(n)
        h = drive[:, None, None] * (a + a.dag()).to_jax()
        solver = dq.method.Euler(dt=0.1)
        found = dq.mesolve(
            h, [0.3 * a], dq.coherent_dm(n, 1.0), jnp.linspace(0.0, 1.0, 5), exp_ops=[a.dag() @ a], method=solver,
            progress_meter=False,
        )  # fmt: skip
        return found.expects.real

    return Case(run, (drive,), {"out_shardings": NamedSharding(mesh, P("data"))})


@program("netket")
def netket_ising(scale: Scale) -> Case:
    """NetKet: local energies of an Ising chain under a restricted Boltzmann machine, samples split over devices."""
    import netket as nk

    mesh, sites, samples = scale.mesh(data=8), scale.pick(16, 64), scale.pick(128, 4096)
    hilbert = nk.hilbert.Spin(0.5, sites)
    energy = nk.operator.IsingJax(hilbert, nk.graph.Chain(sites), h=1.0)
    model = nk.models.RBM(alpha=2, param_dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, sites), jnp.float32))
    w = sharded_like(shapes, fsdp("data"), mesh)
    x = shaped(mesh, P("data", None), (samples, sites))

    def loss(w: Any, x: Any) -> Any:
        spins = jnp.where(x > 0, 1.0, -1.0)
        near, factors = energy.get_conn_padded(spins)
        here = model.apply(w, spins)
        ratios = jnp.exp(model.apply(w, near.reshape(-1, sites)).reshape(factors.shape) - here[:, None])
        local = jax.lax.stop_gradient(jnp.sum(factors * ratios, -1))
        return jnp.mean(2 * (local - local.mean()) * here)

    return train(loss, w, (x,), mesh)


@program("netket")
def netket_transformer(scale: Scale) -> Case:
    """NetKet's autoregressive network: log amplitudes of configurations, weights split over their largest dim."""
    import netket as nk

    mesh, sites = scale.mesh(data=8), scale.pick(16, 64)
    hilbert = nk.hilbert.Spin(0.5, sites)
    model = nk.models.ARNNDense(hilbert, layers=3, features=scale.pick(16, 64), param_dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, sites), jnp.float32))
    w = sharded_like(shapes, fsdp("data"), mesh)
    x = shaped(mesh, P("data", None), (scale.pick(64, 2048), sites))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(model.apply(w, jnp.where(x > 0, 1.0, -1.0)).real ** 2)

    return train(loss, w, (x,), mesh)


@program("e3nn-jax")
def e3nn_convolution(scale: Scale) -> Case:
    """e3nn: an equivariant convolution over the edges of a graph, nodes and edges split over all devices."""
    import e3nn_jax as e3nn

    mesh, nodes, edges = scale.mesh(data=8), scale.pick(64, 4096), scale.pick(256, 32768)
    irreps, out = e3nn.Irreps("8x0e + 8x1o"), e3nn.Irreps("8x0e + 8x1o")
    linear = e3nn.FunctionalLinear(e3nn.tensor_product(irreps, "0e + 1o + 2e"), out)
    w = shaped(mesh, P(), (linear.num_weights,))
    x = shaped(mesh, P("data", None), (nodes, irreps.dim))
    at = shaped(mesh, P("data", None), (nodes, 3))
    ends = shaped(mesh, P("data"), (edges,), jnp.int32)

    def loss(w: Any, x: Any, at: Any, senders: Any, receivers: Any) -> Any:
        x = e3nn.IrrepsArray(irreps, x)
        vectors = e3nn.IrrepsArray("1o", at[receivers] - at[senders] + 1e-2)
        around = e3nn.spherical_harmonics([0, 1, 2], vectors, True)
        sent = e3nn.tensor_product(x[senders], around)
        weights = linear.split_weights(w)
        made = e3nn.scatter_sum(jax.vmap(lambda one: linear(weights, one))(sent), dst=receivers, output_size=nodes)
        return jnp.mean(e3nn.norm(made).array ** 2)

    return Case(jax.value_and_grad(loss), (w, x, at, ends, ends), highest=nodes - 1)


@program("lineax")
def lineax_gradient_descent(scale: Scale) -> Case:
    """lineax's conjugate gradients: a matrix split over both dims, five turns."""
    import lineax as lx

    mesh, n = scale.mesh(rows=2, columns=4), scale.pick(128, 8192)
    a = shaped(mesh, P("rows", "columns"), (n, n))
    b = shaped(mesh, P(("rows", "columns")), (n,))

    def solve(a: Any, b: Any) -> Any:
        operator = lx.MatrixLinearOperator(a @ a.T / n + jnp.eye(n), lx.positive_semidefinite_tag)
        return lx.linear_solve(operator, b, lx.CG(rtol=1e-5, atol=1e-5, max_steps=5), throw=False).value

    return Case(solve, (a, b), {"out_shardings": b.sharding})


@program("optimistix")
def optimistix_least_squares(scale: Scale) -> Case:
    """optimistix's Levenberg-Marquardt on a curve's fit, points split over all devices."""
    import optimistix as optx

    mesh, n = scale.mesh(data=8), scale.pick(256, 65536)
    x, y = (shaped(mesh, P("data"), (n,)) for _ in range(2))
    w = shaped(mesh, P(), (4, 3))

    def fit(w: Any, x: Any, y: Any) -> Any:
        def residual(w: Any, data: Any) -> Any:
            x, y = data
            return jnp.sum(w[:, 0] * jnp.tanh(w[:, 1] * x[:, None] + w[:, 2]), -1) - y

        solver = optx.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
        return optx.least_squares(residual, solver, w, (x, y), max_steps=4, throw=False).value

    return Case(fit, (w, x, y), {"out_shardings": w.sharding})


@program("dm-pix")
def pix_augment(scale: Scale) -> Case:
    """PIX's augmentations: images split by batch and rows, blurred, turned, cropped and compared."""
    import dm_pix as pix

    mesh, n = scale.mesh(data=2, rows=4), scale.pick(32, 512)
    images = shaped(mesh, P("data", "rows"), (scale.pick(4, 16), n, n, 3))

    here = images.sharding

    def augment(images: Any) -> Any:
        x = pix.adjust_contrast(pix.adjust_brightness(images, 0.1), 1.2)
        x = pix.gaussian_blur(x, 1.5, 5)
        x = pix.flip_left_right(pix.rot90(x))
        made = jax.lax.with_sharding_constraint(x, here)
        return made, pix.ssim(images, made)

    return Case(augment, (images,))


@program("jaxlie")
def jaxlie_poses(scale: Scale) -> Case:
    """jaxlie: a pose graph of rigid motions in a ring, poses split over all devices, two steps of gradients."""
    import jaxlie

    mesh, n = scale.mesh(data=8), scale.pick(128, 65536)
    poses = shaped(mesh, P("data", None), (n, 7))
    seen = shaped(mesh, P("data", None), (n, 6))

    def smooth(poses: Any, seen: Any) -> Any:
        def loss(tangent: Any, poses: Any) -> Any:
            here = jaxlie.manifold.rplus(jaxlie.SE3(poses), tangent)
            after = jaxlie.SE3(jnp.roll(here.wxyz_xyz, -1, 0))
            return jnp.mean(((here.inverse() @ after).log() - seen) ** 2)

        for _ in range(2):
            step = jax.grad(loss)(jnp.zeros_like(seen), poses)
            poses = jaxlie.manifold.rplus(jaxlie.SE3(poses), -0.1 * step).wxyz_xyz
        return poses

    return Case(smooth, (poses, seen), {"out_shardings": poses.sharding})


@program("matfree")
def matfree_logdet(scale: Scale) -> Case:
    """matfree's stochastic Lanczos quadrature: a log determinant, its matrix split by rows, probes over devices."""
    from matfree import decomp, funm, stochtrace

    mesh, n = scale.mesh(rows=8), scale.pick(128, 4096)
    a = shaped(mesh, P("rows", None), (n, n))

    def estimate(a: Any) -> Any:
        integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(8))
        estimator = stochtrace.estimator_monte_carlo(integrand, stochtrace.sampler_signs(jnp.ones(n), num=8))
        return estimator(lambda v, a: a @ (a.T @ v) / n + v, jax.random.key(0), a)

    return Case(jax.value_and_grad(estimate), (a,), {"out_shardings": (NamedSharding(mesh, P()), a.sharding)})


@program("brax")
def brax_ant(scale: Scale) -> Case:
    """brax's ant with the positional backend: environments split over all devices, two steps."""
    from brax import envs

    mesh, batch = scale.mesh(data=8), scale.pick(16, 1024)
    env = envs.create("ant", backend="positional", auto_reset=False, episode_length=None)
    action = shaped(mesh, P("data", None), (batch, env.action_size))

    def run(action: Any) -> Any:
        state = jax.vmap(env.reset)(jax.random.split(jax.random.PRNGKey(0), batch))
        for _ in range(2):
            state = jax.vmap(env.step)(state, action)
        return state.obs, jnp.mean(state.reward)

    return Case(run, (action,), {"out_shardings": (NamedSharding(mesh, P("data")), NamedSharding(mesh, P()))})
