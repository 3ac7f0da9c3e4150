"""Edited programs against every method: each cell is the right number or a refusal.

The NumPyro program is the single source of truth. So whatever a user writes into it either changes
the answer as it should, or is refused by a sentence that names the site. The rows, one for each
edit, are in `tests.inference.edited_programs`; here are the columns, one for each method. A number
is the log evidence for exact inference, a bound on it for coordinate ascent, the closed-form ELBO
for the mean-field guide, the density that NUTS and automatic guides work on, and the partition for
RANSAC. No chain is run and no guide is fitted: other files test that methods reach their target.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density, unconstrain_fn

from inference import cavi, exact, gibbs, map_parse, nuts, ransac, svi
from inference.conditions.sets import at_first, conditioned, possible_values, potential
from inference.mcmc import chains
from inference.variational import families
from inference.variational.beginnings import beginnings
from models.errors import InputError
from models.numerics.sinkhorn import log_sinkhorn
from models.program.marginal import marginal
from models.scenes import Scene, make_scene
from models.templates import shapes, stack
from tests import oracle, oracle_inference
from tests import oracle_edits as right
from tests.inference.edited_programs import (
    EDITS,
    MATCH,
    METHODS,
    NUMBER,
    PARTS,
    POSES,
    PRECISION,
    PREFERENCES,
    SCENE,
    Edit,
    K,
    Known,
    N,
    P,
    Refused,
    assumed,
)
from tests.oracle_edits import Assumed

pytestmark = pytest.mark.long

# --- methods: the only code that knows how each of them is entered --------------------------------


KEY = jax.random.key(0)


class Entered(Exception):
    """A method has accepted a program and would begin to work; what it would work on."""

    def __init__(self, *work: Any) -> None:
        self.work = work


@contextlib.contextmanager
def stopped_after_the_checks() -> Iterator[None]:
    """Chains and gradient steps raise `Entered` instead of being compiled and run."""

    def stop(*arguments: Any, **_: Any) -> None:
        raise Entered(*arguments)

    with (
        mock.patch.object(chains, "beginnings", stop),
        mock.patch.object(families, "beginnings", stop),
        mock.patch.object(svi, "climb", stop),
    ):
        yield


def entered(run: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """What a method would work on; its refusals pass."""
    with stopped_after_the_checks(), pytest.raises((Entered, InputError)) as raised:
        run(*arguments, **options)
    if isinstance(raised.value, InputError):
        raise raised.value
    return raised.value.work


def nuts_log_density(program: Any, scene: Scene, values: dict[str, np.ndarray]) -> float:
    """What NUTS samples, as a density of the latent sites themselves.

    The match and all discrete sites are summed out. The potential is that of unconstrained values,
    so the Jacobian comes off again.
    """
    observed = {name: jnp.asarray(x) for name, x in scene.observed.items()}
    table = possible_values(program, scene)
    given = conditioned(marginal(program), at_first(table))
    values = {name: jnp.asarray(x) for name, x in values.items()}
    free = unconstrain_fn(given, (), observed, values)
    energy = float(potential(marginal(program), observed, table, free))
    seeded = handlers.seed(handlers.substitute(given, values), jax.random.key(0))
    sites = handlers.trace(seeded).get_trace(**observed)
    jacobian = sum(
        float(jnp.sum(biject_to(sites[name]["fn"].support).log_abs_det_jacobian(free[name], x)))
        for name, x in values.items()
    )
    return -energy - jacobian


def gibbs_accepts(program: Any, scene: Scene) -> None:
    """Make the checks of `gibbs.run`; its refusals pass."""
    entered(
        gibbs.run,
        program,
        scene,
        KEY,
        num_chains=1,
        num_warmup=0,
        num_samples=4,
        num_temperatures=1,
    )


_SINKHORN = jax.jit(log_sinkhorn)  # outside of a fit it would be lowered again for each program


def svi_at_start(program: Any, scene: Scene) -> tuple[float, dict[str, np.ndarray]]:
    """The closed-form ELBO where the mean-field guide begins, and its parameters there."""
    family, params, frame, *_ = entered(svi.run, program, scene, KEY, num_restarts=1)
    params, frame = jax.tree.map(lambda x: x[0], (params, frame))
    with mock.patch.object(families, "log_sinkhorn", _SINKHORN):
        elbo = family.elbo(params, frame, Scene(**scene.observed))
        q = jax.tree.map(np.asarray, family.constrained(params, frame))
    return float(elbo + family.constant(scene.batch())[0]), q


# --- what a number is -----------------------------------------------------------------------------


RUNS: dict[str, Callable[[Any, Scene], Any]] = {
    "ds": functools.partial(cavi.run, rng_key=KEY),
    "gmm": functools.partial(cavi.run, rng_key=KEY),
    "exact": exact.run,
    "ransac": functools.partial(ransac.run, rng_key=KEY),
    "map": map_parse.run,
    "svi": svi_at_start,
    "svi-auto": lambda program, scene: entered(
        svi.run, program, scene, KEY, guide="AutoNormal", num_restarts=1
    ),
    "nuts": lambda program, scene: entered(nuts.run, program, scene, KEY, num_chains=1),
    "gibbs": gibbs_accepts,
}
"""Of a program and a scene; raise the refusal or return what the check looks at."""


@functools.cache
def base_gap(family: str) -> float:
    """How far the bound lies below the evidence of the base program, by plain coordinate ascent.

    Nearly all of it is the square's four turns, of which a mean-field family has one, and for a
    prior over permutations van der Waerden's inequality.
    """
    problem = problem_of(assumed())
    start = 0.9 * MATCH + 0.1 / N
    projection = "softmax" if family == "mixture" else "sinkhorn"
    for _ in range(5):  # from the truth; to about a tenth of a nat
        step = oracle_inference.coordinate_step(
            problem, start, 1.0, projection=projection, tolerance=1e-4
        )
        start = step.match_probs
    return float(right.log_evidence_given(assumed(), family)) - step.elbo.total


def problem_of(numbers: Assumed) -> oracle_inference.Problem:
    """The same for the plain coordinate ascent; the logits as log probabilities of rows."""
    seen = np.repeat(numbers.present[:, None], 2, axis=1)
    ones = np.ones((N, 2), bool)
    return oracle_inference.Problem(
        numbers.points,
        seen,
        numbers.F,
        np.broadcast_to(numbers.offset, (N, 2)),
        numbers.variance,
        ones,
        numbers.owner,
        numbers.pose_mean,
        numbers.pose_covariance,
        numbers.match_logits,
    )


def rounding(edit: Edit) -> float:
    """What a bound may lie above the evidence by: the oracle's own error."""
    return (
        1e-6 if edit.oracle.continuous else 1e-9 * max(1.0, abs(edit.log_evidence("permutation")))
    )


def check_evidence(edit: Edit, method: str, result: Any) -> None:
    wanted = edit.log_evidence(edit.family_of(method))
    assert abs(result.log_evidence - wanted) < 1e-6 * max(1.0, abs(wanted)), (
        f"log evidence {result.log_evidence}, brute force {wanted}"
    )


def check_bound(edit: Edit, method: str, result: Any) -> None:
    evidence = edit.log_evidence(edit.family_of(method))
    assert result.elbo <= evidence + rounding(edit), (
        f"elbo {result.elbo} above the log evidence {evidence}"
    )
    low, high = edit.gap or usual_gap(edit, edit.family_of(method))
    assert low - rounding(edit) <= evidence - result.elbo <= high, (
        f"elbo {result.elbo}, log evidence {evidence}, wanted {low} to {high} nats between them"
    )


def usual_gap(edit: Edit, family: str) -> tuple[float, float]:
    """How far below the evidence the bound may lie.

    On the scene of the base program as far as there, less what a prior makes one of the square's
    four turns likelier than the others. So a bound for another program does not pass for this one.
    """
    base = base_gap(family)
    low = base - math.log(4) - 0.1 if edit.partition is not None else 0.0
    return max(low, 0.0), base + edit.slack


def check_parse(edit: Edit, method: str, result: Any) -> None:
    """log p(points, match) of a parse that is as probable as its symmetries allow."""
    below = edit.log_evidence(edit.family_of(method)) - result.elbo
    # The turns of the square, and states of objects that no parse near the best one has.
    states = math.log(2) if edit.oracle.discrete else 0.0
    _, widest = edit.gap or (0.0, math.log(4) + states + edit.slack)
    assert -rounding(edit) <= below <= widest, f"elbo {result.elbo}, {below} below the evidence"
    if not (edit.oracle.discrete or edit.oracle.continuous):
        check_partition(edit, method, result)


def check_partition(edit: Edit, method: str, result: Any) -> None:
    if edit.partition is not None:
        found = result.labels.tolist()
        assert found == edit.partition, f"partition {found}, wanted {edit.partition}"


def check_start(edit: Edit, method: str, found: tuple[float, dict[str, np.ndarray]]) -> None:
    """The closed-form ELBO where the fit begins, written out once more in plain numpy."""
    elbo, q = found
    assert elbo <= edit.log_evidence(edit.family_of(method)) + rounding(edit)
    known_otherwise = isinstance(edit.oracle, Known) and not edit.oracle.has_elbo
    if known_otherwise or edit.oracle.discrete or edit.oracle.continuous:
        return
    if edit.family == "mixture":
        return
    numbers = edit.oracle.assumed()
    problem = problem_of(numbers)
    covariance = q["pose_scale_tril"] @ q["pose_scale_tril"].swapaxes(1, 2)
    mean = edit.oracle.pose({"pose": q["pose_mean"]})  # what the likelihood gets
    likelihood = oracle_inference.expected_log_likelihood(problem, mean, covariance, 1.0)
    normaliser = oracle.log_permanent(problem.match_logits) - oracle.log_van_der_waerden(N)
    terms = oracle_inference.elbo_terms(
        problem, q["match_probs"], mean, covariance, likelihood, normaliser
    )
    wanted = terms.total + float(numbers.log_constant)
    assert abs(elbo - wanted) < 1e-6 * max(1.0, abs(wanted)), f"elbo {elbo}, by hand {wanted}"


@functools.cache
def densities(edit: Edit) -> list[tuple[float, float]]:
    """What NUTS and automatic guides work on, and what they should, at two values."""
    program, family = edit.program_of("nuts"), edit.family_of("nuts")
    return [
        (
            nuts_log_density(program, edit.scene, values),
            edit.oracle.log_density(values, family),
        )
        for values in (edit.values(0), edit.values(1))
    ]


def check_density(edit: Edit, method: str, result: Any) -> None:
    for found, wanted in densities(edit):
        assert abs(found - wanted) < 1e-8 * max(1.0, abs(wanted)), (
            f"log density {found}, brute force {wanted}"
        )


def check_pieces(edit: Edit, method: str, result: Any) -> None:
    """Gibbs sampling draws from the pieces of the program that exact inference sums over.

    So if it takes a program, the log evidence that those pieces give must be right. Where exact
    inference refuses, that the method takes the program is all.
    """
    with contextlib.suppress(InputError):
        found = exact.run(edit.program_of("exact"), edit.scene)
        check_evidence(edit, "exact", found)


CHECKS: dict[str, Callable[[Edit, str, Any], None]] = {
    "ds": check_bound,
    "gmm": check_bound,
    "exact": check_evidence,
    "ransac": check_partition,
    "map": check_parse,
    "svi": check_start,
    "svi-auto": check_density,
    "nuts": check_density,
    "gibbs": check_pieces,
}


# --- the table ------------------------------------------------------------------------------------

DENSITIES = {
    "base",
    "Student-t poses",
    "poses under another name",
    "noise=Laplace",
    "a factor of the pose",
    "a match that depends on the pose",
    "a LogNormal precision",
}
"""Programs whose density `make test` looks at: NUTS and automatic guides compile each by itself."""
CLOSED_FORMS = {
    "base",
    "MultivariateNormal of each object",
    "an observed site that depends on nothing",
    "a match prior with preferences",
    "a Gamma precision",
}
"""Those whose closed-form ELBO it looks at."""
CONDITIONS = {
    "a Gamma precision": ("ds", "svi"),
    "a LogNormal precision": ("svi-auto", "nuts"),
    "presence": ("exact", "gibbs"),
}
"""Cells of programs with further latent sites; each of the others compiles for up to 20 seconds."""


def in_make_test(edit: Edit, method: str) -> bool:
    """Every refusal, every number that shares its compiled code, and some of the others."""
    if isinstance(edit.cells[method], Refused):
        return True
    if edit.oracle.continuous or edit.oracle.discrete:
        return method in CONDITIONS.get(edit.name, ())
    chosen = {
        "map": CLOSED_FORMS,
        "svi": CLOSED_FORMS,
        "svi-auto": DENSITIES,
        "nuts": DENSITIES,
    }
    return method not in chosen or edit.name in chosen[method]


def rows(edits: Iterable[Edit], in_make_test: Callable[[Edit], bool]) -> list[Any]:
    """Parameters of a test; `make test-all` runs the rest."""
    marks = [[] if in_make_test(edit) else [pytest.mark.slow] for edit in edits]
    return [
        pytest.param(edit, marks=mark, id=edit.name)
        for edit, mark in zip(edits, marks, strict=True)
    ]


CELLS = [
    pytest.param(
        edit,
        method,
        marks=[] if in_make_test(edit, method) else [pytest.mark.slow],
        id=f"{edit.name}-{method}",
    )
    for method in METHODS  # one by one, so that what is compiled for a method is used at once
    for edit in EDITS
]


@pytest.mark.filterwarnings("ignore:Continuous inference poorly handles circular")
@pytest.mark.parametrize(("edit", "method"), CELLS)
def test_a_cell_is_the_right_number_or_a_refusal(edit, method):
    expected = edit.cells[method]
    try:
        result = RUNS[method](edit.program_of(method), edit.scene)
    except InputError as error:
        assert expected != NUMBER, f"refused: {error}"
        assert any(repr(site) in str(error) for site in expected.sites), (
            f"names none of {expected.sites}: {error}"
        )
        return
    assert not isinstance(expected, Refused), f"took it, should have named {expected.sites}"
    CHECKS[method](edit, method, result)


@pytest.mark.parametrize("start", ["draws", "uniform"])
@pytest.mark.parametrize(
    "edit",
    rows(
        [e for e in EDITS if e.cells["ds"] == NUMBER and not e.oracle.continuous],
        lambda edit: edit.name == "base",
    ),
)
def test_other_starts_of_coordinate_ascent_stay_below_the_evidence(edit, start):
    result = cavi.run(edit.program_of("ds"), edit.scene, KEY, init_strategy=start, num_restarts=4)
    evidence = edit.log_evidence(edit.family_of("ds"))
    assert result.elbo <= evidence + rounding(edit)
    _, widest = edit.gap or usual_gap(edit, edit.family_of("ds"))
    if start == "draws":  # at draws of the parses; a uniform start may end in a worse optimum
        assert evidence - result.elbo <= widest


def test_the_table_is_as_large_as_it_claims():
    assert len(EDITS) >= 35
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    assert all(set(edit.cells) == set(METHODS) for edit in EDITS)


def test_make_test_has_cells_of_every_row_and_names_no_row_in_vain():
    names = {edit.name for edit in EDITS}
    assert names >= DENSITIES | CLOSED_FORMS | CONDITIONS.keys() | set(COMPUTED)
    without = [e.name for e in EDITS if not (e.oracle.continuous or e.oracle.discrete)]
    for edit in EDITS:
        if edit.name in without:
            closed = ("ds", "gmm", "exact", "ransac")
            assert all(in_make_test(edit, method) for method in closed)


# --- the oracle itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [np.zeros((N, N)), PREFERENCES], ids=["uniform", "random"])
def test_the_oracle_agrees_with_listing_every_match(logits):
    numbers = assumed(match_logits=logits)
    listed = oracle_inference.posterior(problem_of(numbers)).log_evidence
    assert right.log_evidence_given(numbers) == pytest.approx(listed, rel=1e-12)


def own_log_density(edit: Edit, values: dict[str, np.ndarray]) -> float:
    """NumPyro's own joint density of an edited program, summed over all permutations by listing.

    No part of the project that sums a match out is used.
    """
    program = handlers.seed(edit.made("permutation"), 0)
    columns = oracle.permutations(N)
    values = {name: jnp.asarray(x) for name, x in values.items()}

    def joint(given: dict[str, Any], match: Any) -> Any:
        every = values | given | {"match": match}
        return log_density(program, (), edit.scene.observed, every)[0]

    log_sums = []
    for states in itertools.product(*edit.oracle.discrete.values()):
        given = {
            name: jnp.asarray(value)
            for name, (value, _) in zip(edit.oracle.discrete, states, strict=True)
        }
        listed = jax.vmap(partial(joint, given))(oracle.as_matrices(columns, N))
        # An impossible state, more points than parts, has no normaliser: zero, not NaN.
        log_sums.append(oracle.log_sum(np.nan_to_num(np.asarray(listed), nan=-np.inf)))
    return oracle.log_sum(np.array(log_sums))


_WITHOUT_A_SUM = ("a subclass of MixtureMatch", "substitute a match", "condition a match")


@pytest.mark.filterwarnings("ignore:Out-of-support values")
@pytest.mark.parametrize(
    "edit",
    rows(
        [
            edit
            for edit in EDITS
            if not isinstance(edit.cells["nuts"], Refused) and edit.name not in _WITHOUT_A_SUM
        ],
        lambda edit: edit.name in DENSITIES,
    ),
)
def test_the_oracle_has_the_density_of_the_program(edit):
    values = edit.values(1)  # where many matches count
    wanted = edit.oracle.log_density(values)
    assert own_log_density(edit, values) == pytest.approx(wanted, rel=1e-8, abs=1e-8)


def test_the_oracle_integrates_its_own_density():
    """Importance sampling of log p(points, pose) from a Normal around the mode of one match."""
    numbers = assumed()
    problem = problem_of(numbers)
    fit = oracle_inference.coordinate_step(problem, MATCH, 1.0)
    rng = np.random.default_rng(0)
    spread = 1.3 * np.linalg.cholesky(fit.pose_covariance)
    draws = fit.pose_mean + np.einsum("kpq,ckq->ckp", spread, rng.normal(size=(300, K, P)))
    proposal = right.multivariate_normal(draws, fit.pose_mean, spread @ spread.swapaxes(1, 2))
    log_ratio = [right.log_density_given(numbers, pose) for pose in draws] - proposal.sum(axis=1)
    estimate = oracle.log_sum(log_ratio) - np.log(len(draws)) + np.log(4)  # turns of the square
    assert estimate == pytest.approx(float(right.log_evidence_given(numbers)), abs=0.15)


# --- an edited copy of the model file -------------------------------------------------------------


def edited_copy(folder: Path, *changes: tuple[str, str]) -> Any:
    """The program of a copy of the model file, with some of its text replaced."""
    text = Path(importlib.import_module("models.constellation").__file__).read_text()
    for old, new in changes:
        assert text.count(old) >= 1
        text = text.replace(old, new, 1)
    copy = folder / "edited_constellation.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location("edited_constellation", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(module.constellation, parts=PARTS, precision=PRECISION)


_NORMAL = "dist.MultivariateNormal(pose_mean, pose_covariance)"
_STUDENT = "dist.MultivariateStudentT(3.0, pose_mean, pose_covariance)"
_PLATE = "    with numpyro.plate("
_GAMMA = '    precision = numpyro.sample("precision", dist.Gamma(2.0, 2e-3))\n\n'


def test_a_prior_edited_in_the_model_file_is_all_that_it_takes(tmp_path):
    program = edited_copy(tmp_path, (_PLATE, _GAMMA + _PLATE))
    row = next(edit for edit in EDITS if edit.name == "a Gamma precision")
    check_bound(row, "ds", cavi.run(program, SCENE, jax.random.key(0)))


@pytest.mark.slow
def test_exact_inference_takes_the_edited_model_file(tmp_path):
    program = edited_copy(tmp_path, (_PLATE, _GAMMA + _PLATE))
    row = next(edit for edit in EDITS if edit.name == "a Gamma precision")
    check_evidence(row, "exact", exact.run(program, SCENE))


def test_the_closed_forms_say_what_they_need(tmp_path):
    program = edited_copy(tmp_path, (_NORMAL, _STUDENT), (_PLATE, _GAMMA + _PLATE))
    for method in ("ds", "exact", "svi"):
        with pytest.raises(InputError) as error:
            RUNS[method](program, SCENE)
        assert "'pose'" in str(error.value) and "MultivariateStudentT" in str(error.value)
        assert "nuts, svi with guide='AutoNormal'" in str(error.value)
    RUNS["nuts"](program, SCENE)


# --- chains have a beginning ----------------------------------------------------------------------

COMPUTED = (
    "polar poses",
    "poses under another name",
    "reparam, LocScaleReparam",
    "noise=StudentT",
    "Student-t poses",
    "a component of the pose prior",
)
"""Programs whose poses are not those of a conjugate site: chains need a stand-in to begin from."""


def chain_start(program: Any, scene: Scene) -> dict[str, np.ndarray]:
    """Values of the continuous latent sites that one chain begins at."""
    begins = beginnings(program, scene, jax.random.key(0), 1)
    return {name: np.asarray(value)[0] for name, value in begins.values.items()}


@pytest.mark.filterwarnings("ignore:Continuous inference poorly handles circular")
@pytest.mark.parametrize(
    "edit",
    rows(
        [edit for edit in EDITS if edit.name in COMPUTED],
        lambda edit: edit.name == "Student-t poses",
    ),
)
def test_chains_begin_where_the_density_is_high(edit):
    values = chain_start(edit.program_of("nuts"), edit.scene)
    begun = edit.oracle.log_density(values, edit.family_of("nuts"))
    near, far = (edit.oracle.log_density(edit.values(index)) for index in (0, 1))
    assert begun > near - 30.0, (
        f"log density {begun} at the start, {near} near the truth, {far} far"
    )


# --- clutter --------------------------------------------------------------------------------------
# Separate, because its scenes have another layout: two slots of a background beside the parts.


def clutter_problem() -> tuple[Any, Scene, Assumed]:
    """A program, a scene with one point of clutter, and what is right about them.

    A slot is a part without a pose, whose density the precision does not touch; its mean and
    variance are read off the parts. To the oracle the background is one more object, with F = 0.
    """
    from models.constellation import cluttered_constellation

    parts = stack(shapes("square", "triangle"), clutter=2)
    program = partial(cluttered_constellation, parts=parts, precision=PRECISION)
    points = np.concatenate([np.asarray(SCENE.points)[SCENE.present], [[1.4, -1.2]]])
    scene = make_scene(points, N + 2)
    F = np.concatenate([np.asarray(PARTS.F), np.zeros((2, 2, P))])
    variance = np.concatenate([np.full((N, 2), 1 / PRECISION), np.asarray(parts.variance)[N:]])
    numbers = Assumed(
        np.asarray(scene.points),
        np.asarray(scene.present),
        F,
        np.append(np.asarray(PARTS.owner), [K, K]),
        np.zeros((K + 1, P)),
        np.tile(np.eye(P), (K + 1, 1, 1)),
        variance,
        np.zeros((N + 2, N + 2)),
        offset=np.asarray(parts.offset),
    )
    return program, scene, numbers


@pytest.mark.slow  # tests.inference.test_clutter has smaller scenes
def test_exact_inference_sums_over_clutter():
    program, scene, numbers = clutter_problem()
    wanted = float(right.log_evidence_given(numbers))
    assert exact.run(program, scene).log_evidence == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_the_bound_holds_with_clutter():
    program, scene, numbers = clutter_problem()
    found = cavi.run(program, scene, jax.random.key(0))
    assert found.elbo <= float(right.log_evidence_given(numbers)) + 1e-9
    assert found.labels[:6].tolist() == [0, 0, 0, 1, 1, 1]


def test_nuts_sums_clutter_out():
    program, scene, numbers = clutter_problem()
    background = np.zeros((1, P))
    wanted = right.log_density_given(numbers, np.concatenate([POSES, background]))
    # The oracle's background has a pose of its own, at its mean; it is no site of the program.
    wanted -= right.multivariate_normal(np.zeros(P), np.zeros(P), np.eye(P))
    assert nuts_log_density(program, scene, {"pose": POSES}) == pytest.approx(wanted, rel=1e-8)


# --- the witness is seen --------------------------------------------------------------------------
# A reader that loses a contribution to the density must end in a refusal and not in a number. Each
# entry breaks the reader in one place; `target` follows the reader's own names.


class Lost(NamedTuple):
    """A contribution that the broken reader drops."""

    edit: str
    """The row on which the loss would change the numbers."""
    site: str
    """What the refusal names."""
    target: str
    """The function that is replaced."""
    broken: Callable[[Callable[..., Any]], Callable[..., Any]]
    """What it is replaced by, made of what it was."""


def _without_mean(whole: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*arguments: Any) -> Any:
        mean, covariance = whole(*arguments)
        return jnp.zeros_like(mean), covariance

    return broken


def _uncorrelated(whole: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*arguments: Any) -> Any:
        mean, covariance = whole(*arguments)
        return mean, covariance * jnp.eye(P)

    return broken


def _nothing(whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jnp.zeros(())


def _unseen(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Of the features of the points one is overlooked."""

    def broken(*arguments: Any) -> Any:
        found = whole(*arguments)
        return dataclasses.replace(found, seen=jnp.asarray(found.seen).at[0, 0].set(False))

    return broken


LOSSES = {
    "the mean of the poses": Lost(
        "Normal.to_event", "pose", "models.program.reading.normal_moments", _without_mean
    ),
    "the correlation of the poses": Lost(
        "MultivariateNormal by covariance",
        "pose",
        "models.program.reading.normal_moments",
        _uncorrelated,
    ),
    "further data": Lost(
        "an observed site that depends on nothing",
        "number",
        "models.program.reading.log_prob_of",
        _nothing,
    ),
    "a factor": Lost("a constant factor", "bonus", "models.program.reading.log_prob_of", _nothing),
    "the prior of a further site": Lost(
        "a LogNormal precision", "precision", "models.program.reading.log_prob_of", _nothing
    ),
    "a feature of a point": Lost("base", "points", "models.program.reading.pieces", _unseen),
}


@pytest.mark.parametrize("method", ["ds", "exact"])
@pytest.mark.parametrize("lost", LOSSES.values(), ids=LOSSES)
def test_a_reader_that_loses_a_contribution_is_refused(lost, method, monkeypatch):
    edit = next(edit for edit in EDITS if edit.name == lost.edit)
    module, name = lost.target.rsplit(".", 1)
    whole = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(lost.target, lost.broken(whole))
    program = partial(edit.program, match_prior=edit.match_prior)  # none that was read before
    with pytest.raises(InputError) as error:
        RUNS[method](program, edit.scene)
    assert repr(lost.site) in str(error.value)
