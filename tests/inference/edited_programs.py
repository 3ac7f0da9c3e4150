"""Edits of a small program, each with what every method should make of it: the rows of a table.

`tests.inference.test_edits` has the columns. A new edit is one program and one `row` above it, with

- cells: for each method `NUMBER` (it takes the program and its number is right), `Refused(sites)`
  (it raises an `InputError` that names one of these sites) or `Either(sites)` (one of the two; what
  must not be is another number),
- the oracle: the right numbers, in plain numpy (`tests.oracle_edits`).

The base is a square and a triangle at a precision of 1e3. All programs have the same parts and all
scenes the same layout, so that methods are compiled once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.distributions.match_priors import presence_logits
from models.scenes import Scene, make_scene
from models.templates import shapes, stack
from tests import oracle
from tests import oracle_edits as right
from tests.oracle_edits import Assumed, Oracle, Scalar

PARTS = stack(shapes("square", "triangle"))
K, N, P = PARTS.num_objects, PARTS.num_parts, PARTS.pose_dim
PRECISION = 1e3
POSES = np.array([[0.5, 0.4, 0.7, 0.2], [-0.6, -0.5, 0.3, 0.6]])
_NOISE = 0.03 * np.random.default_rng(0).normal(size=(N, 2))
_POINTS = np.asarray(PARTS.predict(POSES)) + _NOISE
SCENE = make_scene(_POINTS[[0, 1, 3, 4, 5, 6]], N)
"""Three vertices of the square and the whole triangle."""
PARTITION = [0, 0, 0, 1, 1, 1, -1]
FEW = make_scene(_POINTS[4:], N)
"""The triangle alone."""


# --- cells ----------------------------------------------------------------------------------------

NUMBER = "number"


class Refused(NamedTuple):
    sites: tuple[str, ...]


class Either(NamedTuple):
    sites: tuple[str, ...]


METHODS = ("ds", "gmm", "exact", "ransac", "map", "svi", "svi-auto", "nuts", "gibbs")
"""All methods, `svi` with the mean-field guide and with an automatic one."""

Cells = dict[str, str | Refused | Either]


def conjugate() -> Cells:
    """Every method takes it."""
    return dict.fromkeys(METHODS, NUMBER)


def refused(*sites: str) -> Cells:
    """No method takes it. RANSAC has no density: a right partition of it misleads nobody."""
    return dict.fromkeys(METHODS, Refused(sites)) | {"ransac": Either(sites)}


def either(*sites: str) -> Cells:
    return dict.fromkeys(METHODS, Either(sites))


def any_density(*sites: str) -> Cells:
    """The closed forms do not hold; what works on the density alone takes it."""
    return refused(*sites) | {"svi-auto": NUMBER, "nuts": NUMBER}


def condition(*sites: str) -> Cells:
    """LinearGaussianModel given a further continuous site, which is integrated over, or drawn."""
    return conjugate() | {"svi": Either(sites), "ransac": Either(sites)}


def discrete(*sites: str) -> Cells:
    """LinearGaussianModel given further discrete sites, which are summed over, or drawn."""
    return condition(*sites) | {"svi-auto": Either(sites)}


# --- rows -----------------------------------------------------------------------------------------


def near_the_truth(index: int) -> dict[str, np.ndarray]:
    """Poses at which densities are compared.

    The first are near the mode, where one match counts. The second shrink objects to nearly a
    point, so that many do: a sum over matches cannot pass for its largest term there.
    """
    if index == 0:
        return {"pose": POSES + 0.02 * np.sin(1.0 + np.arange(K * P).reshape(K, P))}
    return {"pose": POSES * (1.0, 1.0, 0.003, 0.003)}


@dataclass(frozen=True, eq=False)
class Edit:
    """A row of the table.

    Args:
        program: of points and present, with a keyword `match_prior`.
        cells: what each method does.
        oracle: the numbers that are right.
        wrap: handlers around the program.
        values: of all continuous latent sites, two of them.
        match_prior: for all methods but gmm.
        family: "permutation" or "mixture", where the program has its own whatever it is asked for.
        partition: that RANSAC finds; None where the scene does not settle it.
        slack: nats that a bound may lie below the evidence beyond what the base program's does.
        gap: how far below it may lie, at least and at most, where the base program says nothing.
    """

    name: str
    program: Callable[..., Any]
    cells: Cells
    oracle: Oracle
    wrap: Callable[[Any], Any] = lambda program: program
    values: Callable[[int], dict[str, np.ndarray]] = near_the_truth
    scene: Scene = SCENE
    match_prior: str = "doubly_stochastic"
    family: str | None = None
    partition: list[int] | None = field(default_factory=lambda: PARTITION)
    slack: float = 0.5
    gap: tuple[float, float] | None = None

    def family_of(self, method: str) -> str:
        """Over which matches a method sums."""
        return self.family or ("mixture" if method == "gmm" else "permutation")

    @functools.cache  # noqa: B019, methods tell programs apart by identity
    def made(self, match_prior: str) -> Any:
        return self.wrap(partial(self.program, match_prior=match_prior))

    def program_of(self, method: str) -> Any:
        return self.made("mixture" if method == "gmm" else self.match_prior)

    @functools.cache  # noqa: B019, computed once for all methods
    def log_evidence(self, family: str) -> float:
        return self.oracle.log_evidence(family)


# --- pieces of programs ---------------------------------------------------------------------------


def poses(prior: dist.Distribution | None = None) -> Any:
    standard = dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P))
    with numpyro.plate("object", K):
        return numpyro.sample("pose", standard if prior is None else prior)


def matches(match_prior: str, logits: Any = None) -> Any:
    if logits is None:
        logits = jnp.full((N, N), -jnp.log(N))
    family = {
        "doubly_stochastic": lambda: DoublyStochasticMatch(jnp.exp(logits)),
        "permutation": lambda: PermutationMatch(logits),
        "mixture": lambda: MixtureMatch(logits),
    }[match_prior]
    return numpyro.sample("match", family())


def observed(match: Any, pose: Any, points: Any, present: Any, **options: Any) -> Any:
    options = {"precision": PRECISION, "present": present} | options
    return numpyro.sample("points", MatchedParts(match, pose, PARTS, **options), obs=points)


def assumed(scene: Scene = SCENE, precision: Any = PRECISION, **changes: Any) -> Assumed:
    """What the base program assumes, with changes; everything in numpy."""
    precision = np.asarray(precision, float)
    base = Assumed(
        np.asarray(scene.points),
        np.asarray(scene.present),
        np.asarray(PARTS.F),
        np.asarray(PARTS.owner),
        np.zeros((K, P)),
        np.tile(np.eye(P), (K, 1, 1)),
        np.ones((N, 2)) / precision[..., None, None],
        np.full((N, N), -np.log(N)),
    )
    return base._replace(**changes)


def fixed(**changes: Any) -> Oracle:
    """The oracle of a program without further sites."""
    return Oracle(lambda: assumed(**changes))


def no_number() -> Assumed:
    raise AssertionError("this program has no number that a method could give")


BASE, NO_NUMBER = fixed(), Oracle(no_number)
EDITS: list[Edit] = []


def row(name: str, cells: Cells, oracle: Oracle = BASE, **options: Any) -> Callable[..., Any]:
    """Put a program into the table."""

    def add(program: Callable[..., Any]) -> Callable[..., Any]:
        EDITS.append(Edit(name, program, cells, oracle, **options))
        return program

    return add


# --- the base, and its pose prior in other words --------------------------------------------------


@row("base", conjugate())
def base(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    return observed(match, pose, points, present)


MEAN = np.array([0.1, -0.2, 0.3, 0.2])
_ROOT = np.tril(0.3 * np.cos(np.arange(P * P).reshape(P, P))) + 0.8 * np.eye(P)
COVARIANCE = _ROOT @ _ROOT.T
SCALE = np.array([0.8, 0.7, 0.6, 0.9])


def of_each(mean: Any, covariance: Any) -> Oracle:
    """Poses with a Normal prior."""
    return fixed(
        pose_mean=np.broadcast_to(mean, (K, P)).astype(float),
        pose_covariance=np.broadcast_to(covariance, (K, P, P)).astype(float),
    )


CORRELATED, DIAGONAL = of_each(MEAN, COVARIANCE), of_each(MEAN, np.diag(SCALE**2))
BY_OBJECT = of_each(np.stack([MEAN, -MEAN]), np.stack([COVARIANCE, np.diag(SCALE**2)]))
_FACTOR = 0.4 * np.cos(np.arange(2 * P).reshape(P, 2))

PRIORS: dict[str, tuple[Callable[[], dist.Distribution], Oracle, Cells]] = {
    "MultivariateNormal by covariance": (
        lambda: dist.MultivariateNormal(MEAN, COVARIANCE),
        CORRELATED,
        conjugate(),
    ),
    "MultivariateNormal by precision": (
        lambda: dist.MultivariateNormal(MEAN, precision_matrix=np.linalg.inv(COVARIANCE)),
        CORRELATED,
        conjugate(),
    ),
    "MultivariateNormal by scale_tril": (
        lambda: dist.MultivariateNormal(MEAN, scale_tril=_ROOT),
        CORRELATED,
        conjugate(),
    ),
    "MultivariateNormal of each object": (
        lambda: dist.MultivariateNormal(
            np.stack([MEAN, -MEAN]), np.stack([COVARIANCE, np.diag(SCALE**2)])
        ),
        BY_OBJECT,
        conjugate(),
    ),
    "LowRankMultivariateNormal": (
        lambda: dist.LowRankMultivariateNormal(MEAN, _FACTOR, SCALE**2),
        of_each(MEAN, _FACTOR @ _FACTOR.T + np.diag(SCALE**2)),
        conjugate(),
    ),
    "Normal.to_event": (lambda: dist.Normal(MEAN, SCALE).to_event(1), DIAGONAL, conjugate()),
    "Normal.expand.to_event": (
        lambda: dist.Normal(0.1, 0.7).expand([P]).to_event(1),
        of_each(np.full(P, 0.1), 0.49 * np.eye(P)),
        conjugate(),
    ),
    "Independent Normal": (
        lambda: dist.Independent(dist.Normal(MEAN, SCALE), 1),
        DIAGONAL,
        conjugate(),
    ),
    "TransformedDistribution, affine": (
        lambda: dist.TransformedDistribution(
            dist.Normal(jnp.zeros(P), 1.0), AffineTransform(MEAN, SCALE)
        ).to_event(1),
        DIAGONAL,
        either("pose") | {"svi-auto": NUMBER, "nuts": NUMBER},
    ),
    "masked by nothing": (
        lambda: dist.Normal(MEAN, SCALE).to_event(1).mask(True),
        DIAGONAL,
        either("pose") | {"svi-auto": NUMBER, "nuts": NUMBER},
    ),
}


def with_prior(points=None, present=None, *, match_prior, prior):
    pose, match = poses(prior()), matches(match_prior)
    return observed(match, pose, points, present)


for _name, (_prior, _oracle, _cells) in PRIORS.items():
    row(_name, _cells, _oracle)(partial(with_prior, prior=_prior))


@row("two nested plates", conjugate(), DIAGONAL)
def nested_plates(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K, dim=-2), numpyro.plate("coordinate", P, dim=-1):
        pose = numpyro.sample("pose", dist.Normal(MEAN, SCALE))
    return observed(matches(match_prior), pose, points, present)


@row("no plate, to_event(2)", conjugate(), DIAGONAL)
def no_plate(points=None, present=None, *, match_prior):
    pose = numpyro.sample("pose", dist.Normal(jnp.tile(MEAN, (K, 1)), SCALE).to_event(2))
    return observed(matches(match_prior), pose, points, present)


@row("MatrixNormal", either("pose") | {"svi-auto": NUMBER, "nuts": NUMBER}, CORRELATED)
def matrix_normal(points=None, present=None, *, match_prior):
    prior = dist.MatrixNormal(jnp.tile(MEAN, (K, 1)), jnp.eye(K), jnp.asarray(_ROOT))
    pose = numpyro.sample("pose", prior)
    return observed(matches(match_prior), pose, points, present)


_ACROSS = np.array([[1.0, 0.0], [0.6, 0.8]])  # rows of one variance, correlated


def correlated_objects(values):
    covariance = np.kron(_ACROSS @ _ACROSS.T, COVARIANCE)
    return float(right.multivariate_normal(values["pose"].ravel(), np.tile(MEAN, K), covariance))


@row(
    "MatrixNormal with correlated objects",
    any_density("pose"),
    Oracle(assumed, log_pose=correlated_objects),
)
def matrix_normal_across(points=None, present=None, *, match_prior):
    prior = dist.MatrixNormal(jnp.tile(MEAN, (K, 1)), jnp.asarray(_ACROSS), jnp.asarray(_ROOT))
    pose = numpyro.sample("pose", prior)
    return observed(matches(match_prior), pose, points, present)


# --- pose priors that are not Normal --------------------------------------------------------------


def student_pose(values):
    # The multivariate density: one chi-square for all coordinates of an object.
    residual = values["pose"] - MEAN
    square = np.einsum("kp,pq,kq->k", residual, np.linalg.inv(COVARIANCE), residual)
    norm = right.math.lgamma((3 + P) / 2) - right.math.lgamma(1.5)
    norm -= 0.5 * P * np.log(3 * np.pi) + 0.5 * np.linalg.slogdet(COVARIANCE)[1]
    return float((norm - (3 + P) / 2 * np.log1p(square / 3)).sum())


@row("Student-t poses", any_density("pose"), Oracle(assumed, log_pose=student_pose))
def student_t_poses(points=None, present=None, *, match_prior):
    pose = poses(dist.MultivariateStudentT(3.0, MEAN, jnp.asarray(_ROOT)))
    return observed(matches(match_prior), pose, points, present)


def truncated_pose(values):
    above = 0.5 * (1 + np.vectorize(right.math.erf)(3 / np.sqrt(2)))
    inside = right.normal(values["pose"], np.asarray(1.0)) - np.log(above)
    return float(inside.sum())


@row("truncated Normal poses", any_density("pose"), Oracle(assumed, log_pose=truncated_pose))
def truncated_poses(points=None, present=None, *, match_prior):
    pose = poses(dist.TruncatedNormal(0.0, 1.0, low=-3.0).expand([P]).to_event(1))
    return observed(matches(match_prior), pose, points, present)


def mixed_pose(values):
    shift = np.array([MEAN, -MEAN])
    components = right.multivariate_normal(values["pose"][:, None], shift, np.eye(P))
    return float(np.logaddexp.reduce(components + np.log([0.3, 0.7]), axis=1).sum())


@row("a mixture as the pose prior", any_density("pose"), Oracle(assumed, log_pose=mixed_pose))
def mixture_poses(points=None, present=None, *, match_prior):
    component = dist.MultivariateNormal(np.array([MEAN, -MEAN]), jnp.eye(P))
    pose = poses(dist.MixtureSameFamily(dist.Categorical(np.array([0.3, 0.7])), component))
    return observed(matches(match_prior), pose, points, present)


@row("Delta poses", refused("pose"), NO_NUMBER)
def delta_poses(points=None, present=None, *, match_prior):
    pose = poses(dist.Delta(jnp.asarray(POSES), event_dim=1))
    return observed(matches(match_prior), pose, points, present)


# --- poses that are computed ----------------------------------------------------------------------


def polar_values(index):
    pose = near_the_truth(index)["pose"]
    size, angle = np.hypot(pose[:, 2], pose[:, 3]), np.arctan2(pose[:, 3], pose[:, 2])
    return {"centre": pose[:, :2], "size": size, "angle": angle}


def polar_pose(values):
    turned = [values["size"] * np.cos(values["angle"]), values["size"] * np.sin(values["angle"])]
    return np.concatenate([values["centre"], np.stack(turned, axis=-1)], axis=-1)


def log_polar(values):
    centre = right.normal(values["centre"], np.asarray(1.0)).sum()
    angle = (2.0 * np.cos(values["angle"]) - np.log(2 * np.pi * np.i0(2.0))).sum()
    return float(centre + angle + right.log_normal(-0.3, 0.4, values["size"]).sum())


@row(
    "polar poses",
    any_density("pose", "centre", "angle", "size"),
    Oracle(assumed, log_pose=log_polar, pose=polar_pose),
    values=polar_values,
)
def polar_poses(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K):
        centre = numpyro.sample("centre", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        angle = numpyro.sample("angle", dist.VonMises(0.0, 2.0))
        size = numpyro.sample("size", dist.LogNormal(-0.3, 0.4))
    turned = jnp.stack([size * jnp.cos(angle), size * jnp.sin(angle)], axis=-1)
    pose = numpyro.deterministic("pose", jnp.concatenate([centre, turned], axis=-1))
    return observed(matches(match_prior), pose, points, present)


def place_values(index):
    return {"place": near_the_truth(index)["pose"]}


@row(
    "poses under another name",
    either("pose", "place") | {"svi-auto": NUMBER, "nuts": NUMBER},
    Oracle(assumed, pose=lambda values: values["place"]),
    values=place_values,
)
def renamed_pose(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K):
        pose = numpyro.sample("place", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
    return observed(matches(match_prior), pose, points, present)


SHIFT = np.array([0.05, -0.1, 0.02, 0.0])


def moved(values):
    return values["pose"] + np.stack([np.zeros(P), SHIFT])


def assumed_moved():
    # The pose of the second object is that of the site and a shift: a shift of its prior's mean.
    return assumed(pose_mean=np.stack([np.zeros(P), SHIFT]))


@row(
    "pose.at[1].add",
    conjugate() | {"svi-auto": Refused(("pose",)), "nuts": Refused(("pose",))},
    Oracle(assumed_moved, pose=moved),
)
def pose_at(points=None, present=None, *, match_prior):
    pose = poses().at[1].add(SHIFT)
    return observed(matches(match_prior), pose, points, present)


@row("a deterministic site", conjugate())
def deterministic(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    numpyro.deterministic("scale", jnp.linalg.norm(pose[:, 2:], axis=-1))
    return observed(match, pose, points, present)


def decentred_values(index):
    return {"pose_decentered": (near_the_truth(index)["pose"] - MEAN) / SCALE}


DECENTRED = Oracle(
    DIAGONAL.assumed,
    log_pose=lambda values: float(right.normal(values["pose_decentered"], np.asarray(1.0)).sum()),
    pose=lambda values: MEAN + SCALE * values["pose_decentered"],
)


@row(
    "reparam, LocScaleReparam",
    any_density("pose", "pose_decentered"),
    DECENTRED,
    values=decentred_values,
    wrap=lambda program: handlers.reparam(program, config={"pose": LocScaleReparam(0)}),
)
def diagonal_poses(points=None, present=None, *, match_prior):
    pose = poses(dist.Normal(MEAN, SCALE).to_event(1))
    return observed(matches(match_prior), pose, points, present)


def base_values(index):
    return {"pose_base": decentred_values(index)["pose_decentered"]}


@row(
    "reparam, TransformReparam",
    any_density("pose", "pose_base"),
    Oracle(
        DIAGONAL.assumed,
        log_pose=lambda values: float(right.normal(values["pose_base"], np.asarray(1.0)).sum()),
        pose=lambda values: MEAN + SCALE * values["pose_base"],
    ),
    values=base_values,
    wrap=lambda program: handlers.reparam(program, config={"pose": TransformReparam()}),
)
def transformed_poses(points=None, present=None, *, match_prior):
    prior = dist.TransformedDistribution(
        dist.Normal(jnp.zeros(P), 1.0).to_event(1), AffineTransform(MEAN, SCALE)
    )
    return observed(matches(match_prior), poses(prior), points, present)


# --- noise ----------------------------------------------------------------------------------------

STUDENT_NOISE = fixed(noise=partial(right.student, 3.0))


class StudentParts(MatchedParts):
    """The table of pairs overridden, as a user would."""

    def pair_log_likelihood(self, points):
        predicted = self.parts.predict(self.pose)[..., None, :, :]
        scale = jnp.sqrt(self.noise_variance)[..., None, :, :]
        pairs = dist.StudentT(3.0, predicted, scale).log_prob(points[..., :, None, :])
        return jnp.where(self.seen[..., :, None, :], pairs, 0.0).sum(axis=-1)


@row("a subclass of MatchedParts", any_density("points"), STUDENT_NOISE)
def student_subclass(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    likelihood = StudentParts(match, pose, PARTS, precision=PRECISION, present=present)
    return numpyro.sample("points", likelihood, obs=points)


@row("noise=StudentT", any_density("points"), STUDENT_NOISE)
def student_noise(points=None, present=None, *, match_prior):
    noise = partial(dist.StudentT, 3.0)
    return observed(matches(match_prior), poses(), points, present, noise=noise)


@row("noise=Laplace", any_density("points"), fixed(noise=right.laplace))
def laplace_noise(points=None, present=None, *, match_prior):
    return observed(matches(match_prior), poses(), points, present, noise=dist.Laplace)


@row("noise=Normal", conjugate())
def normal_noise(points=None, present=None, *, match_prior):
    return observed(matches(match_prior), poses(), points, present, noise=dist.Normal)


@row("points as a plain StudentT", refused("points", "match"), NO_NUMBER)
def plain_student(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    with handlers.mask(mask=True if present is None else present):
        noise = dist.StudentT(3.0, match @ PARTS.predict(pose), 0.03).to_event(1)
        return numpyro.sample("points", noise, obs=points)


@row("points without a match", refused("points", "match"), NO_NUMBER)
def no_match(points=None, present=None, *, match_prior):
    pose = poses()
    noise = dist.StudentT(3.0, PARTS.predict(pose), 0.03).to_event(2)
    return numpyro.sample("points", noise, obs=points)


# --- what is observed -----------------------------------------------------------------------------


@row("obs=2 * points", conjugate(), fixed(points=2 * np.asarray(SCENE.points)))
def twice_the_points(points=None, present=None, *, match_prior):
    points = None if points is None else 2.0 * points
    return observed(matches(match_prior), poses(), points, present)


CENTRE = np.asarray(SCENE.points)[SCENE.present].mean(axis=0)


@row("obs=points - centre", conjugate(), fixed(points=np.asarray(SCENE.points) - CENTRE))
def centred_points(points=None, present=None, *, match_prior):
    centre = jnp.sum(points * present[:, None], axis=0) / present.sum()
    return observed(matches(match_prior), poses(), points - centre, present)


@row(
    "a prior that depends on the points",
    conjugate(),
    of_each(np.append(CENTRE, [0.0, 0.0]), np.eye(P)),
)
def prior_of_the_points(points=None, present=None, *, match_prior):
    centre = jnp.sum(points * present[:, None], axis=0) / present.sum()
    mean = jnp.zeros(P).at[:2].set(centre)
    pose = poses(dist.MultivariateNormal(mean, jnp.eye(P)))
    return observed(matches(match_prior), pose, points, present)


@row(
    "present not passed on",
    any_density("points"),
    fixed(present=np.ones(N, bool)),
    partition=None,
)
def without_present(points=None, present=None, *, match_prior):
    return observed(matches(match_prior), poses(), points, None)


_COUNT = float(right.normal(np.asarray(6.0 - 5.0), np.asarray(2.0)))


@row("an observed site that depends on nothing", conjugate(), fixed(log_constant=_COUNT))
def constant_data(points=None, present=None, *, match_prior):
    number = 6.0 if present is None else present.sum()
    numpyro.sample("number", dist.Normal(5.0, 2.0), obs=number)
    return observed(matches(match_prior), poses(), points, present)


def seen_by_gps(values):
    prior = right.multivariate_normal(values["pose"], np.zeros(P), np.eye(P)).sum()
    return float(prior + right.normal(values["pose"][0, :2] - 0.4, np.asarray(0.1)).sum())


@row(
    "an observed site that depends on the pose",
    any_density("gps"),
    Oracle(assumed, log_pose=seen_by_gps),
)
def data_on_the_pose(points=None, present=None, *, match_prior):
    pose = poses()
    numpyro.sample("gps", dist.Normal(pose[0, :2], 0.1).to_event(1), obs=jnp.full(2, 0.4))
    return observed(matches(match_prior), pose, points, present)


@row("a constant factor", conjugate(), fixed(log_constant=1.5))
def constant_factor(points=None, present=None, *, match_prior):
    numpyro.factor("bonus", 1.5)
    return observed(matches(match_prior), poses(), points, present)


def rewarded(values):
    prior = right.multivariate_normal(values["pose"], np.zeros(P), np.eye(P)).sum()
    return float(prior - 3.0 * values["pose"][1, 2] ** 2)


@row("a factor of the pose", any_density("bonus"), Oracle(assumed, log_pose=rewarded))
def pose_factor(points=None, present=None, *, match_prior):
    pose = poses()
    numpyro.factor("bonus", -3.0 * pose[1, 2] ** 2)
    return observed(matches(match_prior), pose, points, present)


@row("a factor of the match", refused("bonus", "match"), NO_NUMBER)
def match_factor(points=None, present=None, *, match_prior):
    match = matches(match_prior)
    numpyro.factor("bonus", -2.0 * match[0, 0])
    return observed(match, poses(), points, present)


@row("a factor beyond a threshold", any_density("inside"))
def threshold_factor(points=None, present=None, *, match_prior):
    pose = poses()
    too_large = jnp.hypot(pose[:, 2], pose[:, 3]) > 4.0
    numpyro.factor("inside", jnp.where(too_large, -jnp.inf, 0.0).sum())
    return observed(matches(match_prior), pose, points, present)


@row("poses that are clipped", any_density("points"))
def clipped_poses(points=None, present=None, *, match_prior):
    return observed(matches(match_prior), jnp.clip(poses(), -4.0, 4.0), points, present)


@row("a precision beyond a threshold", any_density("points"))
def threshold_precision(points=None, present=None, *, match_prior):
    pose = poses()
    precision = jnp.where(pose[0, 2] > 4.0, 1.0, PRECISION)
    return observed(matches(match_prior), pose, points, present, precision=precision)


@row("a factor of three pairs", refused("bonus", "match"), NO_NUMBER)
def triple_factor(points=None, present=None, *, match_prior):
    match = matches(match_prior)
    pairs = (match[0, 0] == 1) & (match[1, 1] == 1) & (match[2, 2] == 1) & (match[0, 1] == 0)
    numpyro.factor("bonus", jnp.where(pairs, 3.0, 0.0))
    return observed(match, poses(), points, present)


# --- priors that depend on other sites ------------------------------------------------------------


@row("poses that depend on the match", refused("pose", "match"), NO_NUMBER)
def pose_given_match(points=None, present=None, *, match_prior):
    match = matches(match_prior)
    pose = poses(dist.MultivariateNormal(0.5 * match[0, 0] * jnp.ones(P), jnp.eye(P)))
    return observed(match, pose, points, present)


def favoured(pose):
    """A part of the square is likelier for the first point the farther the square is."""
    return np.where(np.asarray(PARTS.owner) == 0, pose[0, 0], 0.0) * np.eye(N)[0][:, None]


def preferring(values):
    """The likelihood under those logits, less that under the uniform ones that comes on top."""
    pose = values["pose"]
    own = right.log_density_given(assumed(match_logits=favoured(pose)), pose)
    return own - right.log_likelihood_given(assumed(), pose)


@row(
    "a match that depends on the pose",
    any_density("match"),
    Oracle(assumed, log_pose=preferring),
    match_prior="permutation",
)
def match_given_pose(points=None, present=None, *, match_prior):
    pose = poses()
    logits = jnp.where(np.asarray(PARTS.owner) == 0, pose[0, 0], 0.0) * jnp.eye(N)[0][:, None]
    return observed(matches(match_prior, logits), pose, points, present)


def heteroscedastic(values):
    pose = values["pose"]
    own = right.log_density_given(assumed(precision=PRECISION * np.exp(pose[0, 2])), pose)
    return own - right.log_likelihood_given(assumed(), pose)


@row(
    "a precision that depends on the pose",
    any_density("points"),
    Oracle(assumed, log_pose=heteroscedastic),
)
def precision_given_pose(points=None, present=None, *, match_prior):
    pose = poses()
    precision = PRECISION * jnp.exp(pose[0, 2])
    return observed(matches(match_prior), pose, points, present, precision=precision)


# --- match priors ---------------------------------------------------------------------------------

PREFERENCES = np.log(oracle.sinkhorn(np.sin(np.arange(N * N).reshape(N, N) ** 1.5)))


@row("a match prior with preferences", conjugate(), fixed(match_logits=PREFERENCES))
def preferences(points=None, present=None, *, match_prior):
    return observed(matches(match_prior, jnp.asarray(PREFERENCES)), poses(), points, present)


class RenamedMixture(MixtureMatch):
    """A subclass that changes nothing."""


class DoubledPreferences(PermutationMatch):
    """A subclass that does: every preference counts twice."""

    @property
    def log_weights(self):
        return 2.0 * self.logits

    @property
    def log_normalizer(self):
        return PermutationMatch(2.0 * self.logits).log_normalizer

    def tilt(self, log_likelihood):
        return PermutationMatch(2.0 * self.logits + log_likelihood)


@row("a subclass of MixtureMatch", either("match"), family="mixture")
def mixture_subclass(points=None, present=None, *, match_prior):
    match = numpyro.sample("match", RenamedMixture(jnp.zeros((N, N))))
    return observed(match, poses(), points, present)


@row(
    "a subclass of PermutationMatch",
    either("match"),
    fixed(match_logits=2.0 * PREFERENCES),
    family="permutation",
)
def permutation_subclass(points=None, present=None, *, match_prior):
    match = numpyro.sample("match", DoubledPreferences(jnp.asarray(PREFERENCES)))
    return observed(match, poses(), points, present)


def flat_part_probs(values):
    prior = right.multivariate_normal(values["pose"], np.zeros(P), np.eye(P)).sum()
    return float(prior) + right.math.lgamma(N)


@row(
    "part probabilities under permutations",
    any_density("part_probs"),
    Oracle(assumed, log_pose=flat_part_probs),
    values=lambda index: near_the_truth(index) | {"part_probs": np.arange(1, N + 1) / 28},
    family="permutation",
)
def part_probs_of_permutations(points=None, present=None, *, match_prior):
    probs = numpyro.sample("part_probs", dist.Dirichlet(jnp.ones(N)))
    prior = PermutationMatch(jnp.broadcast_to(jnp.log(probs), (N, N)))
    return observed(numpyro.sample("match", prior), poses(), points, present)


# --- handlers -------------------------------------------------------------------------------------


def at_pose(family="permutation"):
    return right.log_density_given(assumed(), POSES, family)


@dataclass(frozen=True)
class Known(Oracle):
    """An oracle whose log evidence is known otherwise."""

    evidence: Callable[[str], float] = lambda family: np.nan
    has_elbo: bool = False
    """Whether the ELBO is that of `assumed`, none the less."""

    def log_evidence(self, family="permutation"):
        return self.evidence(family)


@row(
    "condition on the poses",
    either("pose"),
    Known(assumed, evidence=at_pose, pose=lambda values: POSES),
    wrap=lambda program: handlers.condition(program, {"pose": jnp.asarray(POSES)}),
    values=lambda index: {},
)
def conditioned_on_pose(points=None, present=None, *, match_prior):
    return base(points, present, match_prior=match_prior)


MATCH = np.eye(N)[[0, 1, 3, 4, 5, 6, 2]]


def at_match(family="permutation"):
    """log p(points, match) of one match: the sum over matches with all others forbidden."""
    with np.errstate(divide="ignore"):
        only = np.log(MATCH)
    log_prior = -right.math.lgamma(N + 1) if family != "mixture" else -N * np.log(N)
    if family == "mixture":
        only[~SCENE.present] = 0.0
    return float(right.log_evidence_given(assumed(match_logits=only), family)) + log_prior


def given_match(values):
    """The density at poses, less that of the base program, which comes on top."""
    with np.errstate(divide="ignore"):
        only = np.log(MATCH)
    own = right.log_density_given(assumed(match_logits=only), values["pose"])
    return own - right.math.lgamma(N + 1) - right.log_likelihood_given(assumed(), values["pose"])


for _handler in (handlers.substitute, handlers.condition):
    row(
        f"{_handler.__name__} a match",
        either("match"),
        Known(assumed, log_pose=given_match, evidence=at_match),
        wrap=partial(
            lambda handler, program: handler(program, {"match": jnp.asarray(MATCH)}), _handler
        ),
        match_prior="permutation",
        gap=(0.0, 0.1),  # nothing is left to approximate
    )(partial(base))


row(
    "substitute the poses",
    refused("pose"),
    NO_NUMBER,
    wrap=lambda program: handlers.substitute(program, {"pose": jnp.asarray(POSES)}),
)(partial(base))


def all_twice(family="permutation"):
    return right.powered(assumed(), points=2.0, pose=2.0, match=2.0, family=family)


_POINTS_TWICE = right.powered(assumed(), points=2.0)
_POSES_TWICE = right.powered(assumed(), pose=2.0)

row(
    "scale everything",
    either("pose", "match", "points"),
    Known(
        all_twice,
        evidence=lambda family: float(right.log_evidence_given(all_twice(family), family)),
        has_elbo=True,
    ),
    wrap=lambda program: handlers.scale(program, 2.0),
    match_prior="permutation",
)(partial(base))


@row("scale the points", either("points"), Oracle(lambda: _POINTS_TWICE))
def scaled_points(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    with handlers.scale(scale=2.0):
        return observed(match, pose, points, present)


@row("scale the poses", either("pose"), Oracle(lambda: _POSES_TWICE))
def scaled_poses(points=None, present=None, *, match_prior):
    with handlers.scale(scale=2.0):
        pose = poses()
    return observed(matches(match_prior), pose, points, present)


row("mask by nothing", conjugate(), wrap=lambda program: handlers.mask(program, mask=True))(
    partial(base)
)


def prior_only(values):
    prior = right.multivariate_normal(values["pose"], np.zeros(P), np.eye(P)).sum()
    return float(prior) - right.log_likelihood_given(assumed(), values["pose"])


NO_DATA = Known(assumed, log_pose=prior_only, evidence=lambda family: 0.0)


@row("mask the points", either("points"), NO_DATA, partition=None)
def masked_points(points=None, present=None, *, match_prior):
    pose, match = poses(), matches(match_prior)
    with handlers.mask(mask=False):
        return observed(match, pose, points, present)


@row("points.mask(False)", either("points"), NO_DATA, partition=None)
def masked_likelihood(points=None, present=None, *, match_prior):
    match, pose = matches(match_prior), poses()
    likelihood = MatchedParts(match, pose, PARTS, precision=PRECISION, present=present)
    return numpyro.sample("points", likelihood.mask(False), obs=points)


@row(
    "mask the poses",
    either("pose")
    | {"ds": Refused(("pose",)), "gmm": Refused(("pose",)), "exact": Refused(("pose",))},
    Oracle(assumed, log_pose=lambda values: 0.0),
)
def masked_poses(points=None, present=None, *, match_prior):
    with handlers.mask(mask=False):
        pose = poses()
    return observed(matches(match_prior), pose, points, present)


row(
    "block the poses",
    refused("pose"),
    NO_NUMBER,
    wrap=lambda program: handlers.block(handlers.seed(program, 0), hide=["pose"]),
)(partial(base))

row(
    "block a site that is not read",
    conjugate(),
    wrap=lambda program: handlers.block(program, hide=["number"]),
)(constant_data)

GAMMA = (2.0, 2e-3)


def precision_values(index):
    return near_the_truth(index) | {"precision": np.asarray((800.0, 2500.0)[index])}


def unknown_precision(log_prob):
    return Oracle(
        lambda precision: assumed(precision=precision), continuous={"precision": Scalar(log_prob)}
    )


def param_precision(points=None, present=None, *, match_prior):
    precision = numpyro.param("precision", PRECISION, constraint=constraints.positive)
    return observed(matches(match_prior), poses(), points, present, precision=precision)


row("a param that nothing learns", conjugate())(param_precision)


@row(
    "params at other first values",
    conjugate(),
    fixed(
        precision=700.0,
        pose_mean=np.tile(MEAN, (K, 1)),
        pose_covariance=np.tile(COVARIANCE, (K, 1, 1)),
    ),
)
def params_elsewhere(points=None, present=None, *, match_prior):
    precision = numpyro.param("precision", 700.0, constraint=constraints.positive)
    covariance = numpyro.param("cov", COVARIANCE, constraint=constraints.positive_definite)
    prior = dist.MultivariateNormal(numpyro.param("mean", MEAN), covariance)
    return observed(matches(match_prior), poses(prior), points, present, precision=precision)


row(
    "lift a param to a Gamma",
    conjugate(),
    unknown_precision(partial(right.gamma, *GAMMA)),
    wrap=lambda program: handlers.lift(program, prior={"precision": dist.Gamma(*GAMMA)}),
    values=precision_values,
)(param_precision)


# --- plates ---------------------------------------------------------------------------------------


@row("a plate that subsamples all", conjugate())
def whole_subsample(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K, subsample_size=K):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
    return observed(matches(match_prior), pose, points, present)


@row("a plate that subsamples half", either("pose", "object"), Oracle(lambda: _POSES_TWICE))
def half_subsample(points=None, present=None, *, match_prior):
    with numpyro.plate("object", 2 * K, subsample_size=K):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
    return observed(matches(match_prior), pose, points, present)


# --- further continuous sites ---------------------------------------------------------------------


def with_precision(points=None, present=None, *, match_prior, prior):
    precision = numpyro.sample("precision", prior())
    return observed(matches(match_prior), poses(), points, present, precision=precision)


GAMMAS = {"a Gamma precision": GAMMA, "a Gamma precision far from the prior": (50.0, 5e-5)}
for _name, _numbers in GAMMAS.items():
    row(
        _name,
        conjugate(),
        unknown_precision(partial(right.gamma, *_numbers)),
        values=precision_values,
    )(partial(with_precision, prior=partial(dist.Gamma, *_numbers)))

row(
    "a LogNormal precision",
    condition("precision"),
    unknown_precision(partial(right.log_normal, 6.0, 1.5)),
    values=precision_values,
)(partial(with_precision, prior=partial(dist.LogNormal, 6.0, 1.5)))


@row(
    "a HalfNormal sigma",
    condition("sigma"),
    Oracle(
        lambda sigma: assumed(precision=sigma**-2),
        continuous={"sigma": Scalar(partial(right.half_normal, 0.1), (-10.0, 4.0))},
    ),
    values=lambda index: near_the_truth(index) | {"sigma": np.asarray((0.03, 0.1)[index])},
)
def half_normal_sigma(points=None, present=None, *, match_prior):
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.1))
    return observed(matches(match_prior), poses(), points, present, precision=sigma**-2)


def spread(scale):
    return np.asarray(scale)[..., None, None, None] ** 2 * np.tile(np.eye(P), (K, 1, 1))


def scale_values(index):
    return near_the_truth(index) | {"pose_scale": np.asarray((0.5, 2.0)[index])}


@row(
    "a HalfNormal scale of the poses",
    condition("pose_scale", "pose"),
    Oracle(
        lambda pose_scale: assumed(pose_covariance=spread(pose_scale)),
        continuous={"pose_scale": Scalar(partial(right.half_normal, 1.0), (-8.0, 4.0))},
    ),
    values=scale_values,
)
def pose_scale(points=None, present=None, *, match_prior):
    scale = numpyro.sample("pose_scale", dist.HalfNormal(1.0))
    pose = poses(dist.Normal(jnp.zeros(P), scale).to_event(1))
    return observed(matches(match_prior), pose, points, present)


@row(
    "a Gamma precision that scales the poses too",
    condition("precision", "pose"),
    Oracle(
        lambda precision: assumed(
            precision=precision, pose_covariance=spread(np.sqrt(500.0 / precision))
        ),
        continuous={"precision": Scalar(partial(right.gamma, *GAMMA))},
    ),
    values=precision_values,
)
def normal_gamma(points=None, present=None, *, match_prior):
    precision = numpyro.sample("precision", dist.Gamma(*GAMMA))
    pose = poses(dist.Normal(jnp.zeros(P), jnp.sqrt(500.0 / precision)).to_event(1))
    return observed(matches(match_prior), pose, points, present, precision=precision)


@row(
    "a LogNormal precision and a HalfNormal scale",
    condition("precision", "pose_scale", "pose") | {"gmm": Either(("precision", "pose_scale"))},
    Oracle(
        lambda precision, pose_scale: assumed(
            precision=precision, pose_covariance=spread(pose_scale)
        ),
        continuous={
            "precision": Scalar(partial(right.log_normal, 6.0, 1.5)),
            "pose_scale": Scalar(partial(right.half_normal, 1.0), (-8.0, 4.0)),
        },
    ),
    values=lambda index: precision_values(index) | scale_values(index),
)
def two_scalars(points=None, present=None, *, match_prior):
    precision = numpyro.sample("precision", dist.LogNormal(6.0, 1.5))
    scale = numpyro.sample("pose_scale", dist.HalfNormal(1.0))
    pose = poses(dist.Normal(jnp.zeros(P), scale).to_event(1))
    return observed(matches(match_prior), pose, points, present, precision=precision)


def three_prior(values):
    own = right.log_normal(6.0, 1.5, values["precision"])
    own += right.half_normal(1.0, values["pose_scale"]) + right.normal(
        values["level"], np.asarray(1.0)
    )
    numbers = assumed(
        precision=values["precision"],
        pose_mean=np.full((K, P), float(values["level"])),
        pose_covariance=spread(values["pose_scale"]),
    )
    density = right.log_density_given(numbers, values["pose"])
    return float(own) + density - right.log_likelihood_given(assumed(), values["pose"])


@row(
    "three continuous sites",
    any_density("precision", "pose_scale", "level", "pose"),
    Oracle(assumed, log_pose=three_prior),
    values=lambda index: precision_values(index) | scale_values(index) | {"level": np.asarray(0.1)},
)
def three_scalars(points=None, present=None, *, match_prior):
    precision = numpyro.sample("precision", dist.LogNormal(6.0, 1.5))
    scale = numpyro.sample("pose_scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    pose = poses(dist.Normal(jnp.full(P, level), scale).to_event(1))
    return observed(matches(match_prior), pose, points, present, precision=precision)


def vector_prior(values):
    own = right.log_normal(6.0, 1.0, values["precision"]).sum()
    variance = np.repeat(1 / values["precision"][np.asarray(PARTS.owner)][:, None], 2, axis=1)
    density = right.log_density_given(assumed(variance=variance), values["pose"])
    return float(own) + density - right.log_likelihood_given(assumed(), values["pose"])


@row(
    "a precision for each object",
    any_density("precision", "points"),
    Oracle(assumed, log_pose=vector_prior),
    values=lambda index: near_the_truth(index) | {"precision": np.array([700.0, 1500.0])},
)
def vector_precision(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K):
        precision = numpyro.sample("precision", dist.LogNormal(6.0, 1.0))
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
    variance = PARTS.variance / precision[np.asarray(PARTS.owner), None]
    likelihood = MatchedParts(
        matches(match_prior), pose, PARTS._replace(variance=variance), present=present
    )
    return numpyro.sample("points", likelihood, obs=points)


@row("a support that depends on another site", refused("sigma"), NO_NUMBER)
def moving_support(points=None, present=None, *, match_prior):
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    sigma = numpyro.sample("sigma", dist.Uniform(0.001, jnp.array([0.02, 0.5])[kind]))
    return observed(matches(match_prior), poses(), points, present, precision=sigma**-2)


@row("values that depend on another site", refused("level"), NO_NUMBER)
def moving_values(points=None, present=None, *, match_prior):
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    level = numpyro.sample("level", dist.DiscreteUniform(0, kind + 1))
    precision = jnp.array([1e1, 1e2, 1e3])[level]
    return observed(matches(match_prior), poses(), points, present, precision=precision)


_WIDEST = 0.1 * float(np.abs(_POINTS[[0, 1, 3, 4, 5, 6]]).max())


@row(
    "a support that depends on the scene",
    any_density("sigma") | {"svi-auto": Refused(("sigma",))},
    Oracle(
        lambda sigma: assumed(precision=sigma**-2),
        continuous={"sigma": Scalar(lambda sigma: -np.log(_WIDEST - 0.001))},
    ),
    values=lambda index: near_the_truth(index) | {"sigma": np.asarray((0.03, 0.06)[index])},
)
def support_of_scene(points=None, present=None, *, match_prior):
    sigma = numpyro.sample("sigma", dist.Uniform(0.001, 0.1 * jnp.abs(points).max()))
    return observed(matches(match_prior), poses(), points, present, precision=sigma**-2)


@row(
    "a support that depends on a continuous site",
    any_density("sigma", "pose_scale") | {"svi-auto": Refused(("sigma",))},
    Oracle(
        lambda sigma, pose_scale: assumed(precision=sigma**-2, log_constant=-np.log(pose_scale)),
        continuous={
            "sigma": Scalar(lambda sigma: 0.0),
            "pose_scale": Scalar(partial(right.half_normal, 1.0)),
        },
    ),
    values=lambda index: scale_values(index) | {"sigma": np.asarray((0.03, 0.1)[index])},
)
def support_of_scalar(points=None, present=None, *, match_prior):
    scale = numpyro.sample("pose_scale", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.Uniform(0.0, scale))
    return observed(matches(match_prior), poses(), points, present, precision=sigma**-2)


# --- few points, high precision -------------------------------------------------------------------

for _precision in (1e-2, 1e8, 1e10):
    row(
        f"precision {_precision:g} with three points",
        conjugate() | {"ransac": Either(("points",))},
        fixed(scene=FEW, precision=_precision),
        scene=FEW,
        partition=None,
        slack=np.inf,  # which of many matches with tiny residuals ascent ends in is luck
    )(
        partial(
            lambda points=None, present=None, *, match_prior, precision: observed(
                matches(match_prior), poses(), points, present, precision=precision
            ),
            precision=_precision,
        )
    )


# --- further discrete sites -----------------------------------------------------------------------

SHIFTS = np.array([0.3 * MEAN, -2.0 * MEAN])


@row(
    "a component of the pose prior",
    discrete("component", "pose"),
    Oracle(
        lambda component: assumed(pose_mean=np.tile(SHIFTS[component], (K, 1))),
        discrete={"component": [(0, np.log(0.3)), (1, np.log(0.7))]},
    ),
)
def component_of_prior(points=None, present=None, *, match_prior):
    component = numpyro.sample("component", dist.Categorical(np.array([0.3, 0.7])))
    pose = poses(dist.MultivariateNormal(jnp.asarray(SHIFTS)[component], jnp.eye(P)))
    return observed(matches(match_prior), pose, points, present)


def all_states(probs):
    probs = np.asarray(probs)
    return [
        (np.array(state), float(np.log(probs[list(state)]).sum()))
        for state in right.itertools.product(range(len(probs)), repeat=K)
    ]


@row(
    "a kind of each object",
    discrete("kind", "pose"),
    Oracle(
        lambda kind: assumed(pose_mean=SHIFTS[kind]),
        discrete={"kind": all_states([0.4, 0.6])},
    ),
)
def kind_of_object(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K):
        kind = numpyro.sample("kind", dist.Categorical(np.array([0.4, 0.6])))
        prior = dist.MultivariateNormal(jnp.asarray(SHIFTS)[kind], jnp.eye(P))
        pose = numpyro.sample("pose", prior)
    return observed(matches(match_prior), pose, points, present)


def assumed_present(presence, visibility, **changes):
    """An absent object has no points, a part of a present one is seen with some probability."""
    visibility = np.asarray(visibility, float)
    here = np.asarray(presence, bool)[np.asarray(PARTS.owner)]
    with np.errstate(divide="ignore"):
        seen = np.where(here, np.log(visibility)[..., None], -np.inf)
        unseen = np.where(here, np.log1p(-visibility)[..., None], 0.0)
    rows = np.asarray(FEW.present)[:, None]
    logits = np.where(rows, seen[..., None, :], unseen[..., None, :])
    number = right.binomial(int(FEW.present.sum()), int(here.sum()), visibility)
    return assumed(scene=FEW, match_logits=logits, log_constant=number, **changes)


def presence_program(points, present, match_prior, presence, pose, visibility):
    there = (jnp.asarray(presence) > 0)[PARTS.owner].sum()
    seen = None if present is None else present.sum()
    numpyro.sample("count", dist.Binomial(there, visibility), obs=seen)
    logits = presence_logits(jnp.asarray(presence) > 0, visibility, present, PARTS.owner)
    return observed(matches(match_prior, logits), pose, points, present)


ON_FEW: dict[str, Any] = {"scene": FEW, "match_prior": "permutation", "partition": None}
PRESENCE = discrete("presence", "count", "match") | {"gmm": Either(("presence", "count", "match"))}


@row(
    "presence",
    PRESENCE,
    Oracle(
        lambda presence: assumed_present(presence, 0.8),
        discrete={"presence": all_states([0.3, 0.7])},
    ),
    **ON_FEW,
)
def presence(points=None, present=None, presence=None, *, match_prior):
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
        presence = numpyro.sample("presence", dist.Bernoulli(0.7), obs=presence)
    return presence_program(points, present, match_prior, presence, pose, 0.8)


@row(
    "presence in one of two states",
    PRESENCE,
    Oracle(
        lambda presence: assumed_present(
            presence, 0.8, pose_mean=SHIFTS[np.maximum(presence - 1, 0)]
        ),
        discrete={"presence": all_states([0.3, 0.3, 0.4])},
    ),
    **ON_FEW,
)
def presence_states(points=None, present=None, presence=None, *, match_prior):
    with numpyro.plate("object", K):
        state = dist.Categorical(np.array([0.3, 0.3, 0.4]))
        presence = numpyro.sample("presence", state, obs=presence)
        mean = jnp.asarray(SHIFTS)[jnp.maximum(jnp.asarray(presence, int) - 1, 0)]
        pose = numpyro.sample("pose", dist.MultivariateNormal(mean, jnp.eye(P)))
    return presence_program(points, present, match_prior, presence, pose, 0.8)


@row(
    "presence under another name",
    discrete("there", "count", "match") | {"gmm": Either(("there", "count", "match"))},
    Oracle(lambda there: assumed_present(there, 0.8), discrete={"there": all_states([0.3, 0.7])}),
    **ON_FEW,
)
def presence_renamed(points=None, present=None, *, match_prior):
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
        there = numpyro.sample("there", dist.Bernoulli(0.7))
    return presence_program(points, present, match_prior, there, pose, 0.8)


@row(
    "a Beta visibility with presence",
    discrete("presence", "visibility", "count", "match")
    | {"gmm": Either(("presence", "visibility", "count", "match"))},
    Oracle(
        assumed_present,
        discrete={"presence": all_states([0.3, 0.7])},
        continuous={
            "visibility": Scalar(partial(right.beta, 8.0, 2.0), (-12.0, 14.0), unit_interval=True)
        },
    ),
    values=lambda index: near_the_truth(index) | {"visibility": np.asarray((0.8, 0.5)[index])},
    **ON_FEW,
)
def beta_visibility(points=None, present=None, presence=None, *, match_prior):
    visibility = numpyro.sample("visibility", dist.Beta(8.0, 2.0))
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
        presence = numpyro.sample("presence", dist.Bernoulli(0.7), obs=presence)
    return presence_program(points, present, match_prior, presence, pose, visibility)


@row(
    "a scale on a discrete site",
    discrete("kind"),
    Oracle(
        lambda kind: assumed(precision=1e3 if kind else 1e2),
        discrete={"kind": [(0, 2 * np.log(0.7)), (1, 2 * np.log(0.3))]},
    ),
)
def scaled_discrete(points=None, present=None, *, match_prior):
    with handlers.scale(scale=2.0):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3))
    pose, match = poses(), matches(match_prior)
    return observed(match, pose, points, present, precision=jnp.where(kind == 1, 1e3, 1e2))
