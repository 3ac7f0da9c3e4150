"""The three match distributions against brute force over all matches."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpyro.distributions import Distribution
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import MCMC, NUTS

from models.constellation import uniform_probs
from models.distributions.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    weighted_sum,
)
from models.distributions.match_priors import presence_logits, typed_probs
from models.errors import InputError
from models.numerics.sinkhorn import log_sinkhorn
from tests import oracle

SIZE = 4
DRAWS = 20_000
FORBIDDEN = (np.eye(SIZE) + np.eye(SIZE, k=2)) > 0


class Family(NamedTuple):
    """How a match distribution is made, and which matches it gives weight to."""

    cls: type[Distribution]
    parameter: Callable[[np.ndarray], np.ndarray]  # from any logits
    log_weights: Callable[[np.ndarray], np.ndarray]  # from the parameter
    matches: Callable[[int, int], np.ndarray]

    def make(self, logits: np.ndarray) -> Distribution:
        return self.cls(jnp.asarray(self.parameter(logits)))


def log_of(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, float))


def unchanged(logits: np.ndarray) -> np.ndarray:
    return logits


FAMILIES = {
    "doubly_stochastic": Family(DoublyStochasticMatch, oracle.sinkhorn, log_of, oracle.injections),
    "permutation": Family(PermutationMatch, unchanged, unchanged, oracle.injections),
    "mixture": Family(MixtureMatch, unchanged, unchanged, oracle.assignments),
}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def some_logits(seed: int, batch: tuple[int, ...] = (), forbidden: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=1.5, size=(*batch, SIZE, SIZE))
    return np.where(FORBIDDEN, -np.inf, logits) if forbidden else logits


each_pattern = pytest.mark.parametrize("forbidden", [False, True], ids=["dense", "forbidden"])


@jax.jit
def answers(match: Distribution) -> dict[str, jax.Array]:
    """Everything that a match distribution is asked for; the distribution goes through jit."""
    return {
        "log_normalizer": match.log_normalizer,
        "mean": match.mean,
        "variance": match.variance,
        "mode": match.mode,
        "entropy": match.entropy(),
    }


@jax.jit
def log_prob(match: Distribution, value: jax.Array) -> jax.Array:
    return match.log_prob(value)


@jax.jit
def draw(key: jax.Array, match: Distribution) -> jax.Array:
    return match.sample(key, (DRAWS,))


@jax.jit
def kl(first: Distribution, second: Distribution) -> jax.Array:
    return kl_divergence(first, second)


def assert_frequencies(observed: np.ndarray, expected: np.ndarray, draws: int = DRAWS) -> None:
    """Within five standard errors; what is impossible or certain, exactly."""
    standard_error = np.sqrt(np.maximum(expected * (1 - expected), 0) / draws)
    assert (abs(observed - expected) <= 5 * standard_error + 1e-12).all()


# --- values -------------------------------------------------------------------------------------


@each_family
@each_pattern
def test_normaliser_and_mode(family, forbidden):
    logits = some_logits(0, forbidden=forbidden)
    weights = family.log_weights(family.parameter(logits))
    matches = family.matches(SIZE, SIZE)
    result = answers(family.make(logits))
    np.testing.assert_allclose(
        result["log_normalizer"], oracle.log_normaliser(weights, matches), rtol=1e-11, atol=1e-11
    )
    best = matches[np.argmax(oracle.scores(weights, matches))]
    np.testing.assert_array_equal(result["mode"], oracle.as_matrices(best, SIZE))


@each_family
@each_pattern
def test_moments_and_entropy(family, forbidden):
    logits = some_logits(1, forbidden=forbidden)
    weights = family.log_weights(family.parameter(logits))
    if family.cls is DoublyStochasticMatch:  # these are of independent rows
        matches = oracle.assignments(SIZE, SIZE)
    else:
        matches = family.matches(SIZE, SIZE)
    result = answers(family.make(logits))
    mean = oracle.marginals(weights, matches)
    np.testing.assert_allclose(result["mean"], mean, atol=1e-11)
    np.testing.assert_allclose(result["variance"], mean - mean**2, atol=1e-11)
    entropy = oracle.entropy(oracle.probabilities(weights, matches))
    np.testing.assert_allclose(result["entropy"], entropy, rtol=1e-11, atol=1e-11)


@each_family
@each_pattern
def test_log_prob_of_every_match(family, forbidden):
    logits = some_logits(2, forbidden=forbidden)
    weights = family.log_weights(family.parameter(logits))
    matches = family.matches(SIZE, SIZE)
    expected = oracle.scores(weights, matches)
    if family.cls is not DoublyStochasticMatch:  # which is the product as printed
        expected = expected - oracle.log_normaliser(weights, matches)
    result = log_prob(family.make(logits), oracle.as_matrices(matches, SIZE))
    np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-11)


@each_family
def test_the_support_is_listed_once_and_is_valid(family):
    match = family.make(some_logits(3))
    listed = np.asarray(match.enumerate_support())
    expected = oracle.as_matrices(family.matches(SIZE, SIZE), SIZE)
    assert listed.shape == expected.shape
    assert len(np.unique(listed.reshape(len(listed), -1), axis=0)) == len(expected)
    np.testing.assert_array_equal(np.unique(listed, axis=0), np.unique(expected, axis=0))
    assert match.support(listed).all()


@each_family
def test_the_support_of_a_batch_can_be_expanded(family):
    match = family.make(some_logits(3, batch=(2,)))
    count = len(family.matches(SIZE, SIZE))
    assert match.enumerate_support(expand=True).shape == (count, 2, SIZE, SIZE)
    assert match.enumerate_support(expand=False).shape == (count, 1, SIZE, SIZE)


@pytest.mark.parametrize("name", ["permutation", "mixture"])
def test_probabilities_sum_to_one(name):
    match = FAMILIES[name].make(some_logits(4))
    np.testing.assert_allclose(np.exp(log_prob(match, match.enumerate_support())).sum(), 1)


def test_the_printed_product_sums_to_the_permanent_and_over_rows_to_one():
    probs = oracle.sinkhorn(some_logits(4))
    match = DoublyStochasticMatch(probs, validate_args=False)  # the rows share columns below
    over_permutations = np.exp(log_prob(match, oracle.permutation_matrices(SIZE))).sum()
    np.testing.assert_allclose(np.log(over_permutations), oracle.log_permanent(np.log(probs)))
    independent_rows = oracle.as_matrices(oracle.assignments(SIZE, SIZE), SIZE)
    np.testing.assert_allclose(np.exp(log_prob(match, independent_rows)).sum(), 1)


@each_family
@each_pattern
def test_tilting_by_a_likelihood_gives_the_posterior(family, forbidden):
    logits, likelihood = some_logits(5, forbidden=forbidden), some_logits(6)
    weights = family.log_weights(family.parameter(logits))
    matches = family.matches(SIZE, SIZE)
    posterior = family.make(logits).tilt(jnp.asarray(likelihood))
    expected = oracle.marginals(weights + likelihood, matches)
    np.testing.assert_allclose(answers(posterior)["mean"], expected, atol=1e-11)


def test_a_mixture_may_have_other_numbers_of_points_and_parts():
    logits = np.random.default_rng(7).normal(size=(2, 5))
    match = MixtureMatch(logits)
    matches = oracle.assignments(2, 5)
    assert match.event_shape == (2, 5)
    support = match.enumerate_support()
    np.testing.assert_array_equal(support, oracle.as_matrices(matches, 5))
    probs = oracle.probabilities(logits, matches)
    np.testing.assert_allclose(np.exp(log_prob(match, support)), probs, rtol=1e-11)
    np.testing.assert_allclose(match.mean, oracle.marginals(logits, matches), atol=1e-12)
    assert match.sample(jax.random.key(0), (3,)).shape == (3, 2, 5)


# --- divergences --------------------------------------------------------------------------------

KL_OVER = {
    ("doubly_stochastic", "doubly_stochastic"): oracle.assignments,
    ("doubly_stochastic", "mixture"): oracle.assignments,
    ("permutation", "permutation"): oracle.injections,
    ("mixture", "doubly_stochastic"): oracle.assignments,
    ("mixture", "mixture"): oracle.assignments,
}
BOUND = ("doubly_stochastic", "permutation")
TO_ROWS = [("permutation", "doubly_stochastic"), ("permutation", "mixture")]
INFINITE = ("mixture", "permutation")


def test_every_registered_divergence_has_a_row_here():
    pairs = itertools.product(FAMILIES, repeat=2)
    classes = {pair: tuple(FAMILIES[name].cls for name in pair) for pair in pairs}
    registered = {pair for pair in classes if classes[pair] in kl_divergence.funcs}
    assert registered == {*KL_OVER, BOUND, *TO_ROWS, INFINITE} == set(classes)


@each_pattern
@pytest.mark.parametrize("pair", KL_OVER)
def test_divergence(pair, forbidden):
    families = [FAMILIES[name] for name in pair]
    logits = [some_logits(seed, forbidden=forbidden) for seed in (8, 9)]
    matches = KL_OVER[pair](SIZE, SIZE)
    weights = [f.log_weights(f.parameter(x)) for f, x in zip(families, logits, strict=True)]
    expected = oracle.kl(*(oracle.probabilities(w, matches) for w in weights))
    result = kl(*(f.make(x) for f, x in zip(families, logits, strict=True)))
    np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-10)


@each_pattern
@pytest.mark.parametrize("pair", TO_ROWS)
def test_divergence_from_permutations_to_independent_rows(pair, forbidden):
    """The sum is over permutations, to which the rows give less than one in all."""
    logits, others = (some_logits(seed, forbidden=forbidden) for seed in (8, 9))
    rows = FAMILIES[pair[1]]
    log_rows = rows.log_weights(rows.parameter(others))
    log_rows = log_rows - np.logaddexp.reduce(log_rows, axis=1, keepdims=True)
    matches = oracle.permutations(SIZE)
    expected = oracle.kl(
        oracle.probabilities(logits, matches), np.exp(oracle.scores(log_rows, matches))
    )
    result = kl(PermutationMatch(logits), rows.make(others))
    np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-10)


def test_a_mixture_has_no_finite_divergence_from_permutations():
    with pytest.raises(InputError, match="is infinite: under a mixture two rows may share"):
        kl_divergence(MixtureMatch(some_logits(8)), PermutationMatch(some_logits(9)))


@pytest.mark.parametrize("pair", KL_OVER)
def test_divergence_is_infinite_where_the_second_forbids(pair):
    first, second = (FAMILIES[name] for name in pair)
    assert kl(first.make(some_logits(8)), second.make(some_logits(9, forbidden=True))) == np.inf


@each_pattern
def test_the_bound_is_made_of_its_pieces(forbidden):
    """sum r log r - sum r theta + log perm(e^theta) - log(N!/N^N)."""
    probs = oracle.sinkhorn(some_logits(10, forbidden=forbidden))
    logits = some_logits(11, forbidden=forbidden)
    possible = probs > 0
    expected = (
        np.sum(probs[possible] * (np.log(probs[possible]) - logits[possible]))
        + oracle.log_permanent(logits)
        - oracle.log_van_der_waerden(SIZE)
    )
    result = kl(DoublyStochasticMatch(probs), PermutationMatch(logits))
    np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-11)


@given(
    shares=arrays(float, 24, elements=st.floats(0, 1).map(lambda x: round(x, 6))).filter(np.any),
    prior=arrays(float, (SIZE, SIZE), elements=st.floats(-20, 20)),
    likelihood=arrays(float, (SIZE, SIZE), elements=st.floats(-20, 20)),
    optimal=st.booleans(),
)
def test_the_bound_never_exceeds_the_evidence(shares, prior, likelihood, optimal):
    """Van der Waerden: sum r log b - sum r log r + log(N!/N^N) <= log perm(B), for every R and B.

    So with this divergence sum r C - KL stays below the log evidence, for any doubly stochastic R
    (a mix of permutations) and, the hardest case, for the best one.
    """
    probs = np.tensordot(shares / shares.sum(), oracle.permutation_matrices(SIZE), 1)
    if optimal:
        probs = np.asarray(np.exp(scaled(prior + likelihood)))
    divergence = kl(DoublyStochasticMatch(probs), PermutationMatch(prior))
    elbo = np.sum(probs * likelihood) - divergence
    evidence = oracle.log_permanent(prior + likelihood) - oracle.log_permanent(prior)
    assert elbo <= evidence + 1e-9


scaled = jax.jit(log_sinkhorn)


def test_the_bound_is_reached_where_all_matches_weigh_the_same():
    divergence = kl(DoublyStochasticMatch(uniform_probs(SIZE)), PermutationMatch(np.ones((4, 4))))
    np.testing.assert_allclose(divergence, 0, atol=1e-12)


def test_under_a_uniform_prior_the_bound_is_the_divergence_of_the_paper():
    match = DoublyStochasticMatch(oracle.sinkhorn(some_logits(12)))
    bound = kl(match, PermutationMatch(np.zeros((SIZE, SIZE))))
    np.testing.assert_allclose(bound, kl(match, DoublyStochasticMatch(uniform_probs(SIZE))))


# --- draws --------------------------------------------------------------------------------------


@each_family
@each_pattern
def test_draws_have_the_exact_marginals(family, forbidden):
    """And forbidden pairs, whose marginal is zero, are never drawn."""
    logits = some_logits(13, forbidden=forbidden)
    parameter = family.parameter(logits)
    if family.cls is DoublyStochasticMatch:
        expected = parameter
    else:
        expected = oracle.marginals(parameter, family.matches(SIZE, SIZE))
    draws = draw(jax.random.key(0), family.make(logits))
    assert family.cls.support(draws).all()
    assert_frequencies(draws.mean(axis=0), expected)


@pytest.mark.parametrize(
    ("family", "parameter"),
    [
        ("doubly_stochastic", np.full((3, 3), 1 / 3)),
        ("permutation", np.random.default_rng(14).normal(size=(3, 3))),
        ("mixture", np.random.default_rng(15).normal(size=(3, 3))),
    ],
)
def test_draws_have_the_exact_joint_frequencies(family, parameter):
    """Over whole matches; under the uniform p_DS all six permutations are equally frequent."""
    family = FAMILIES[family]
    matches = family.matches(3, 3)
    expected = oracle.probabilities(family.log_weights(parameter), matches)
    draws = np.asarray(draw(jax.random.key(1), family.cls(jnp.asarray(parameter))))
    columns = draws.argmax(axis=-1)
    frequencies = (columns[:, None] == matches).all(axis=-1).mean(axis=0)
    assert_frequencies(frequencies, expected)


# --- batches and transformations ----------------------------------------------------------------


@each_family
def test_a_batch_is_the_loop(family):
    logits = some_logits(16, batch=(2, 3))
    match = family.make(logits)
    assert (match.batch_shape, match.event_shape) == ((2, 3), (SIZE, SIZE))
    result = answers(match)
    value = oracle.as_matrices(oracle.permutations(SIZE)[5], SIZE)
    log_probs = log_prob(match, value)
    assert log_probs.shape == (2, 3)
    for index in np.ndindex(2, 3):
        one = family.make(logits[index])
        np.testing.assert_allclose(log_probs[index], log_prob(one, value), rtol=1e-11)
        for name, expected in answers(one).items():
            np.testing.assert_allclose(
                result[name][index], expected, rtol=1e-11, atol=1e-11, err_msg=name
            )


@pytest.mark.slow
@each_family
def test_draws_of_a_batch(family):
    match = family.make(some_logits(17, batch=(2,)))
    draws = draw(jax.random.key(2), match)
    assert draws.shape == (DRAWS, 2, SIZE, SIZE)
    assert_frequencies(draws.mean(axis=0), np.asarray(answers(match)["mean"]))


@each_family
def test_vmap_over_the_parameter(family):
    parameter = family.parameter(some_logits(18, batch=(3,)))
    means, modes = jax.jit(jax.vmap(lambda one: (family.cls(one).mean, family.cls(one).mode)))(
        parameter
    )
    for one, mean, mode in zip(parameter, means, modes, strict=True):
        expected = answers(family.cls(jnp.asarray(one)))
        np.testing.assert_allclose(mean, expected["mean"], atol=1e-11)
        np.testing.assert_array_equal(mode, expected["mode"])


@each_family
def test_a_distribution_is_a_pytree(family):
    match = family.make(some_logits(19, batch=(2,)))
    leaves, structure = jax.tree.flatten(match)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert type(rebuilt) is type(match)
    assert (rebuilt.batch_shape, rebuilt.event_shape) == (match.batch_shape, match.event_shape)
    through_jit = jax.jit(lambda match: match)(match)
    for copy in (rebuilt, through_jit):
        np.testing.assert_array_equal(answers(copy)["mean"], answers(match)["mean"])


@each_family
def test_a_distribution_can_be_built_from_a_constant_inside_jit(family):
    """As a program with a fixed prior does when it is compiled."""
    parameter = jnp.asarray(family.parameter(some_logits(20)))
    entropy = jax.jit(lambda: family.cls(parameter).entropy())()
    np.testing.assert_allclose(entropy, answers(family.cls(parameter))["entropy"])


@each_family
def test_expanding(family):
    match = family.make(some_logits(21))
    value = np.eye(SIZE)
    expanded = log_prob(match.expand((3,)), value)
    np.testing.assert_allclose(expanded, np.repeat(log_prob(match, value), 3))


@each_family
def test_the_support_of_copies_is_listed(family):
    """NumPyro's own expanded distribution lists scalars only."""
    match = family.make(some_logits(21))
    listed = match.enumerate_support()
    copies = match.expand((3,))
    assert copies.enumerate_support(expand=False).shape == (len(listed), 1, SIZE, SIZE)
    every = copies.expand((2, 3)).enumerate_support()
    assert every.shape == (len(listed), 2, 3, SIZE, SIZE)
    np.testing.assert_array_equal(every[:, 1, 2], listed)
    np.testing.assert_array_equal(
        jax.tree.map(jnp.asarray, copies).enumerate_support(), every[:, 0]
    )


@each_family
def test_automatic_enumeration_is_refused(family):
    """It would put numbers in the place of matrices."""

    def program():
        numpyro.sample("match", family.make(some_logits(21)))

    with pytest.raises(RuntimeError, match="discrete sites with enumerate support"):
        MCMC(NUTS(program), num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0))


# --- gradients ----------------------------------------------------------------------------------


def from_logits(family: Family, logits: jax.Array) -> Distribution:
    """A match distribution as a differentiable function of free logits."""
    if family.cls is DoublyStochasticMatch:
        return DoublyStochasticMatch(jnp.exp(log_sinkhorn(logits)))
    return family.cls(logits)


QUANTITIES = {
    "log_normalizer": lambda match, other: match.log_normalizer,
    "log_prob": lambda match, other: match.log_prob(jnp.roll(jnp.eye(SIZE), 1, axis=1)),
    "mean": lambda match, other: jnp.sum(match.mean * np.arange(SIZE**2).reshape(SIZE, SIZE)),
    "entropy": lambda match, other: match.entropy(),
    "divergence": lambda match, other: kl_divergence(match, other),
}


@functools.cache
def quantities_of(family: Family) -> tuple[Callable, Callable]:
    """All quantities as one function of two logits, and its derivative: compiled once."""

    def quantities(logits, other):
        match, other = from_logits(family, logits), from_logits(family, other)
        return jnp.stack([quantity(match, other) for quantity in QUANTITIES.values()])

    return jax.jit(quantities), jax.jit(jax.jacrev(quantities))


@each_family
@each_pattern
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_gradients_are_finite_and_right(family, forbidden, quantity):
    logits, other = (some_logits(seed, forbidden=forbidden) for seed in (22, 23))
    values, jacobian = quantities_of(family)
    expected = oracle.finite_difference(lambda x: values(x, other), logits)
    row = list(QUANTITIES).index(quantity)
    np.testing.assert_allclose(jacobian(logits, other)[row], expected[row], atol=1e-8)


# --- priors -------------------------------------------------------------------------------------


def test_typed_probs_are_the_marginals_of_all_matches_that_respect_the_types():
    part_type = np.array([0, 0, 0, 1, 1, 2])
    point_type = np.array([1, 0, 0, 2, 0, 0])  # of dummies: anything
    present = np.array([True, True, True, False, True, False])
    allowed = (point_type[:, None] == part_type) | ~present[:, None]
    expected = oracle.marginals(log_of(allowed), oracle.permutations(6))
    result = typed_probs(*map(jnp.asarray, (point_type, present, part_type)))
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_presence_logits_are_those_of_each_pair():
    """Two objects, of which the second is absent, and a slot for clutter."""
    found = presence_logits(
        np.array([1, 0]), 0.7, np.array([True, True, False]), np.array([0, 1, 2]), 0.2
    )
    point = [np.log(0.7), -np.inf, np.log(0.2)]
    dummy = [np.log(0.3), 0.0, np.log(0.8)]
    np.testing.assert_allclose(found, [point, point, dummy], rtol=1e-12)


def test_a_weighted_sum_is_silent_about_what_is_not_matched():
    match = jnp.asarray([[1.0, 0.0], [0.0, 0.5]])
    weights = jnp.asarray([[2.0, -np.inf], [np.nan, 4.0]])
    assert weighted_sum(match, weights) == 4.0
    gradient = jax.grad(weighted_sum, argnums=1)(match, weights)
    np.testing.assert_array_equal(gradient, match)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: PermutationMatch(jnp.zeros((4, 3))), r"as many rows as columns, got .*\(4, 3\)"),
        (lambda: PermutationMatch(jnp.zeros(3)), r"as many rows as columns, got shape \(3,\)"),
        (lambda: PermutationMatch(jnp.eye(3), normalizer="mean"), "'exact' or 'bethe', got 'mean'"),
        (lambda: DoublyStochasticMatch(jnp.ones((2, 3))), r"probs must be square .* got \(2, 3\)"),
        (lambda: DoublyStochasticMatch(jnp.eye(2) * 0.5), "rows sum to 0.5 to 0.5"),
        (
            lambda: DoublyStochasticMatch(jnp.array([[0.7, 0.3], [0.6, 0.4]])),
            r"rows sum to 1 to 1 and the columns to 0\.7 to 1\.3",
        ),
        (
            lambda: DoublyStochasticMatch(jnp.array([[1.5, -0.5], [-0.5, 1.5]])),
            "entries of at least 0",
        ),
        (lambda: DoublyStochasticMatch(jnp.full((2, 2), jnp.nan)), "rows sum to nan"),
        (lambda: MixtureMatch(jnp.zeros(3)), r"must be a matrix .* got shape \(3,\)"),
        (
            lambda: PermutationMatch(jnp.zeros((9, 9))).enumerate_support(),
            r"9! permutation matrices, 362,880",
        ),
        (
            lambda: MixtureMatch(jnp.zeros((7, 7))).enumerate_support(),
            r"7\^7 assignments of points to parts, 823,543",
        ),
        (
            lambda: PermutationMatch(jnp.zeros((6, 9))).enumerate_support(),
            r"9!/3! permutation matrices, 60,480",
        ),
        (lambda: PermutationMatch(jnp.zeros((21, 21))).log_normalizer, "21 rows.*'bethe'"),
    ],
)
def test_bad_parameters_are_explained(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
