"""The families that SVI can fit: the hand-derived one, or an automatic guide on the marginal.

A `Family` has the start of its runs, a random loss with an unbiased gradient, and the ELBO by which
runs are compared. Poses are measured from the start of a run in standard deviations of q there.
Then one learning rate fits all parameters: at a precision of 1e4 a pose has a scale of 0.005 and a
match logit one of 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jax.scipy.special import xlogy
from jaxtyping import Array, Float, Int
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import AffineTransform, IndependentTransform
from numpyro.handlers import reparam, seed, trace
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO, autoguide, init_to_median
from numpyro.infer.reparam import Reparam

from guides import meanfield
from guides.guide import mean_field_guide
from guides.meanfield import PoseFactor
from guides.projections import PROJECTIONS
from inference.conditions.problem import Problem, read_problem
from inference.proposals.propose import propose_whole
from inference.variational.ascent import Schedule
from inference.variational.beginnings import beginnings
from inference.variational.pool import begins_of, engine, run_keys
from models.distributions.match import DoublyStochasticMatch, MixtureMatch
from models.numerics.linalg import cholesky
from models.numerics.sinkhorn import log_sinkhorn
from models.program.marginal import marginal
from models.program.reading import LinearGaussianModel, read
from models.program.sites import Program
from models.scenes import Layout, Scene

AUTOMATIC = ("AutoMultivariateNormal", "AutoNormal", "AutoIAFNormal")
"""Names of the automatic guides in NumPyro."""

JUDGES = 256
"""Number of particles that estimate the ELBO of an automatic guide; the same draws every time."""

Params = dict[str, Any]


class Frame(NamedTuple):
    """The initial poses of a run, and the unit in which poses are measured.

    For an automatic guide both are dictionaries of the unconstrained sites on which poses depend.
    """

    centre: Any
    unit: Any


class Family(NamedTuple):
    """A family of q for one program. All but `begin` and `constant` are functions of one run."""

    begin: Callable[[Scene, Array, Int[np.ndarray, "runs 2"]], tuple[Params, Frame]]
    """From scenes, a key, and the scene and attempt of each run to the free parameters of runs."""
    loss: Callable[[Array, Params, Frame, Scene], Float[Array, ""]]
    elbo: Callable[[Params, Frame, Scene], Float[Array, ""]]
    constrained: Callable[[Params, Frame], Params]
    """The constrained parameters of the guide."""
    draw: Callable[[Array, Params, Frame, int], dict[str, Array]]
    """Draws from q by site."""
    constant: Callable[[Scene], Float[np.ndarray, " scenes"]]
    """The constant that `elbo` leaves out, for each scene of a batch."""


# --- the hand-derived family --------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def mean_field(program: Program, start: str, particles: int, layout: Layout) -> Family:
    """The paper's mean-field family on the program; the ELBO sums over the match in closed form."""
    blank = layout.blank()
    example = read(program, blank)
    guide = mean_field_guide(program, blank)
    # The guide's own bijection singles out the last row and column. All N x N logits are a
    # redundant parameterisation, but steps along them are better conditioned.
    transforms = _transforms(guide) | {"match_probs": lambda logits: jnp.exp(log_sinkhorn(logits))}
    estimate = TraceMeanField_ELBO(num_particles=particles)
    is_mixture = example.match_family is MixtureMatch
    projection_name = "softmax" if is_mixture else "sinkhorn"
    owner = np.asarray(example.parts.owner)
    poses_given = jax.jit(lambda model, *given: meanfield.update_pose(model, owner, *given))

    def begin(scenes: Scene, key: Array, runs: Int[np.ndarray, "runs 2"]) -> tuple[Params, Frame]:
        """Begin at the R from which coordinate ascent starts with this key, and poses given it."""
        problem = _problem(program, scenes)
        ascent = engine(problem.skeleton, projection_name, Schedule())
        parses = propose_whole(problem.reading) if start == "parses" else None
        pieces = problem.reading.take(runs[:, 0])
        keys = run_keys(key, runs)
        pool = ascent.start(pieces, keys, *begins_of(parses, runs))
        match_probs = pool.state.match_probs
        noise = meanfield.fixed_precision(pool.model, jnp.ones(len(runs)))
        pose = poses_given(pool.model, match_probs, noise)
        factor = cholesky(pose.covariance)
        variance = jnp.diagonal(pose.covariance)
        values = {
            "pose_scale_tril": jnp.moveaxis(factor, (3, 2), (0, 1)),
        }
        for name, prior in (
            ("precision_posterior", pool.model.precision_prior),
            ("part_concentration", pool.model.part_prior),
        ):
            if prior is not None:
                values[name] = jnp.broadcast_to(prior, (len(prior), len(runs))).T
        frame = Frame(jnp.moveaxis(pose.mean, (2, 1), (0, 1)), jnp.sqrt(variance).swapaxes(0, 1))
        match = "match_logits" if is_mixture else "match_probs"
        # Bound R away from zero, where the gradient vanishes.
        free = {match: jnp.moveaxis(jnp.log(jnp.maximum(match_probs, 1e-3)), 2, 0)}
        free |= {name: transforms[name].inv(x) for name, x in values.items()}
        return free | {"pose_mean": jnp.zeros_like(frame.centre)}, frame

    def constrained(free: Params, frame: Frame) -> Params:
        params = {name: transforms[name](x) for name, x in free.items()}
        return params | {"pose_mean": frame.centre + frame.unit * free["pose_mean"]}

    def loss(key: Array, free: Params, frame: Frame, scene: Scene) -> Float[Array, ""]:
        params = constrained(free, frame)
        return estimate.loss(key, params, program, guide, **scene.observed)

    def elbo(free: Params, frame: Frame, scene: Scene) -> Float[Array, ""]:
        return mean_field_elbo(read(program, scene), owner, constrained(free, frame))

    def draw(key: Array, free: Params, frame: Frame, count: int) -> dict[str, Array]:
        params = constrained(free, frame)
        keys = jax.random.split(key, 4)
        q = {
            "pose": dist.MultivariateNormal(
                params["pose_mean"], scale_tril=params["pose_scale_tril"]
            )
        }
        if "precision_posterior" in params:
            q["precision"] = dist.Gamma(*params["precision_posterior"])
        if "part_concentration" in params:
            q["part_probs"] = dist.Dirichlet(params["part_concentration"])
        if is_mixture:
            q["match"] = MixtureMatch(params["match_logits"])
        else:
            q["match"] = DoublyStochasticMatch(params["match_probs"])
        drawn = {
            name: factor.sample(key, (count,))
            for key, (name, factor) in zip(keys, q.items(), strict=False)
        }
        return drawn | {"match": drawn["match"].argmax(axis=-1)}

    def constant(scenes: Scene) -> Float[np.ndarray, " scenes"]:
        bound = PROJECTIONS[projection_name].log_bound(layout.num_rows)
        return _problem(program, scenes).log_constant + bound

    return Family(begin, loss, elbo, constrained, draw, constant)


def _problem(program: Program, scenes: Scene) -> Problem:
    problem = read_problem(program, scenes, or_bound=True)
    assert isinstance(problem, Problem)  # guaranteed by `check_conjugate`
    return problem


def mean_field_elbo(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], params: Params
) -> Float[Array, ""]:
    """The ELBO in closed form at any parameters of the guide, up to the constant of the scene."""
    model = jax.tree.map(lambda x: x[..., None], model)
    factor = params["pose_scale_tril"]
    pose = PoseFactor(
        params["pose_mean"].T[..., None],
        jnp.einsum("kpr,kqr->pqk", factor, factor)[..., None],
        -2.0 * jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)[..., None],
    )
    one = jnp.ones(1)
    precision, part_probs = meanfield.fixed_precision(model, one), None
    if model.precision_prior is not None:
        concentration, rate = params["precision_posterior"][:, None]
        precision = meanfield.gamma_precision(model, concentration, rate, one)
    if model.part_prior is not None:
        part_probs = meanfield.dirichlet_part_probs(model, params["part_concentration"][:, None])
    match_probs = match_probs_of(params)[..., None]
    energy = meanfield.expected_energy(model, owner, pose)
    log_likelihood = meanfield.expected_log_likelihood(model, energy, precision)
    entropy = -meanfield.matrix_sum(xlogy(match_probs, match_probs))
    terms = meanfield.elbo_terms(
        model, match_probs, entropy, jnp.zeros(1), pose, log_likelihood, precision, part_probs
    )
    return terms.elbo[0]


def match_probs_of(params: Params) -> Float[Array, "*batch N N"]:
    """R from a guide's parameters, `match_logits` or `match_probs`."""
    if "match_logits" in params:
        return jax.nn.softmax(params["match_logits"], axis=-1)
    return params["match_probs"]


# --- automatic guides ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def automatic(
    program: Program,
    names: tuple[str, ...],
    name: str,
    start: str,
    particles: int,
    layout: Layout,
) -> Family:
    """One of NumPyro's guides on the program with its match summed out, for any prior.

    Args:
        names: the sites on which poses depend (`inference.posterior.poses.pose_sites`); these are
            rescaled.
    """
    blank = layout.blank()
    given = {} if name == "AutoIAFNormal" else {"init_scale": 0.5}
    zero, one = jnp.zeros(()), jnp.ones(())
    guide = getattr(autoguide, name)(
        _measured(program, Frame(dict.fromkeys(names, zero), dict.fromkeys(names, one))),
        init_loc_fn=functools.partial(_init),
        **given,
    )
    first = trace(seed(guide, jax.random.key(0))).get_trace(**blank.observed)
    initial = {name: site["value"] for name, site in first.items() if site["type"] == "param"}
    transforms = _transforms(guide, blank)
    estimate, judge = Trace_ELBO(num_particles=particles), Trace_ELBO(num_particles=JUDGES)
    sites = trace(seed(marginal(program), jax.random.key(0))).get_trace(**blank.observed)
    latent = [n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]]
    supports = {name: biject_to(sites[name]["fn"].support) for name in names}

    def begin(scenes: Scene, key: Array, runs: Int[np.ndarray, "runs 2"]) -> tuple[Params, Frame]:
        begins = beginnings(program, scenes.take(0), key, len(runs), start)  # type: ignore[arg-type]
        variance = jnp.diagonal(begins.covariance, axis1=-2, axis2=-1).reshape(len(runs), -1)
        centre = {name: jax.vmap(supports[name].inv)(begins.values[name]) for name in names}
        _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], centre))
        free = {name: _inverse(transforms[name], x) for name, x in initial.items()}
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(runs), *jnp.shape(x))), free)
        return repeated, Frame(centre, jax.vmap(unravel)(jnp.sqrt(variance)))

    def constrained(free: Params, frame: Frame) -> Params:
        return {name: _apply(transforms[name], x) for name, x in free.items()}

    def estimated(
        by: Trace_ELBO, key: Array, free: Params, frame: Frame, scene: Scene
    ) -> Float[Array, ""]:
        params = constrained(free, frame)
        return by.loss(key, params, _measured(program, frame), guide, **scene.observed)

    def elbo(free: Params, frame: Frame, scene: Scene) -> Float[Array, ""]:
        return -estimated(judge, jax.random.key(0), free, frame, scene)

    def draw(key: Array, free: Params, frame: Frame, count: int) -> dict[str, Array]:
        drawn = guide.sample_posterior(key, constrained(free, frame), sample_shape=(count,))
        # The guide itself computes sites in the frame it was created with, so compute them here.
        measured = {name: drawn[f"{name}_measured"] for name in names}
        return {name: drawn[name] for name in latent if name not in names} | {
            name: jax.vmap(supports[name])(frame.centre[name] + frame.unit[name] * x)
            for name, x in measured.items()
        }

    loss = functools.partial(estimated, estimate)
    return Family(begin, loss, elbo, constrained, draw, lambda scenes: np.zeros(len(scenes.points)))


class _Measured(Reparam):
    """A site whose unconstrained value is centre + unit * `<site>_measured`."""

    def __init__(self, centre: Array, unit: Array) -> None:
        self.centre, self.unit = centre, unit

    def __call__(self, name: str, fn: dist.Distribution, obs: Any) -> tuple[None, Array]:
        support = biject_to(fn.support)
        shape = support.inverse_shape(fn.shape())
        inverse = AffineTransform(
            jnp.broadcast_to(-self.centre / self.unit, shape),
            jnp.broadcast_to(1.0 / self.unit, shape),
        )
        transforms = [support.inv, IndependentTransform(inverse, support.domain.event_dim)]
        measured = numpyro.sample(f"{name}_measured", dist.TransformedDistribution(fn, transforms))
        return None, support(self.centre + self.unit * measured)


def _measured(program: Program, frame: Frame) -> Program:
    config = {name: _Measured(frame.centre[name], frame.unit[name]) for name in frame.centre}
    return reparam(marginal(program), config=config)


def _init(site: dict[str, Any]) -> Any:
    """Measured sites begin at their centre, others at the median of their priors."""
    if site["name"].endswith("_measured"):
        return jnp.zeros(site["fn"].shape())
    return init_to_median(site, num_samples=255)


# --- parameters and their constraints -----------------------------------------------------------


def _transforms(guide: Callable[..., Any], scene: Scene | None = None) -> dict[str, Any]:
    """For each parameter of a guide, the map from free values to its constraint."""
    observed = {} if scene is None else scene.observed
    found: dict[str, Any] = {}

    def look() -> None:
        sites = trace(seed(guide, jax.random.key(0))).get_trace(**observed)
        for name, site in sites.items():
            if site["type"] == "param":
                found[name] = biject_to(site["kwargs"].get("constraint", constraints.real))

    jax.eval_shape(look)  # traces without computing values or compiling
    return found


def _apply(transform: Any, value: Any) -> Any:
    return jax.tree.map(transform, value)


def _inverse(transform: Any, value: Any) -> Any:
    return jax.tree.map(transform.inv, value)
