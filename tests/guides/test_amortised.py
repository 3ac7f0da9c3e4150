"""The amortised guide on a tiny program: what it learns, keeps, resumes and refuses."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from guides import training
from guides.amortised import (
    AmortisedGuide,
    Settings,
    Size,
    _fingerprint,
    amortise,
    digest,
    fit,
    load_guide,
    orbit_loss,
)
from guides.simulation import Draws, as_arrays, simulator_of, some
from guides.symmetries import find
from models.constellation import constellation, presence_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import InputError
from models.numerics.sinkhorn import scale
from models.scenes import Scene
from models.templates import shapes, stack, with_clutter

PARTS = stack(shapes("triangle"))
PROGRAM = functools.partial(constellation, parts=PARTS, precision=1e3)
TINY = Settings(num_steps=30, batch_size=32, size=Size(width=8, num_layers=1, num_heads=2))
KEY = jax.random.key(0)


def guide(seed=0, num_parts=5):
    return AmortisedGuide(2, num_parts, Size(16, 2, 2), jax.random.key(seed))


def scenes(count=7, rows=5, seed=0):
    rng = np.random.default_rng(seed)
    present = rng.random((count, rows)) < 0.6
    present[:, 0] = True
    return Scene(rng.normal(size=(count, rows, 2)), present)


def logits_of(points, present):
    return guide().match_logits(Scene(points, present))


def test_permuted_points_permute_the_logits():
    points, present = scenes()[:2]
    order = np.random.default_rng(1).permutation(5)
    moved = logits_of(points[:, order], present[:, order])
    np.testing.assert_allclose(moved, logits_of(points, present)[:, order], atol=1e-5)


def test_absent_rows_count_for_nothing():
    points, present = scenes()[:2]
    assert not present.all()
    logits = logits_of(points, present)
    with_others = jax.vmap(guide())(np.where(present[..., None], points, 9.0), present)
    np.testing.assert_allclose(with_others, logits, atol=1e-5)
    assert (logits[~present] == 0).all()


def test_match_probabilities_are_doubly_stochastic():
    probs = guide().match_probs(scenes())
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-9)
    np.testing.assert_allclose(probs.sum(axis=2), 1, atol=1e-9)
    dummies = probs[0][~scenes().present[0]]
    np.testing.assert_allclose(dummies, np.broadcast_to(dummies[0], dummies.shape))


def test_match_probabilities_are_the_scaling_of_the_logits_however_sharp():
    some = scenes(count=300)
    for sharpness in (1.0, 300.0, 1e4):
        network = eqx.tree_at(
            lambda n: (n.head.weight, n.head.bias),
            guide(),
            (sharpness * guide().head.weight, sharpness * guide().head.bias),
        )
        probs, logits = network.match_probs(some), network.match_logits(some)
        expected = scale(jnp.moveaxis(jnp.asarray(logits), 0, -1), 1e-9).matrix
        np.testing.assert_allclose(probs, jnp.moveaxis(expected, -1, 0), atol=1e-6)
        np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-8)


@pytest.mark.long
def test_draws_are_those_of_the_program():
    draws = simulator_of(PROGRAM)(KEY, 200)
    assert np.bincount(draws.present.sum(axis=1), minlength=4)[1:].min() > 40  # 1, 2 or 3 points
    whole = draws.take(draws.present.all(axis=1))
    for points, part in zip(whole.points, whole.part, strict=True):
        F = np.asarray(PARTS.F)[part].reshape(6, 4)
        left = points.ravel() - F @ np.linalg.lstsq(F, points.ravel(), rcond=None)[0]
        assert np.abs(left).max() < 0.2  # noise of 0.03 in six numbers less four
    orders = {tuple(part) for part in whole.part}
    assert len(orders) == 6


@pytest.mark.long
def test_clutter_and_missing_objects_are_drawn_where_the_program_has_them():
    parts = with_clutter(PARTS, 2)
    draws = simulator_of(functools.partial(presence_constellation, parts=parts))(KEY, 300)
    is_clutter = (draws.part >= 3) & draws.present
    assert set(is_clutter.sum(axis=1)) == {0, 1, 2}
    of_object = ((draws.part < 3) & draws.present).sum(axis=1)
    assert set(of_object) == {0, 3}


def test_scenes_without_points_are_left_out():
    present = np.array([[False, False], [True, False], [False, False]])
    draws = Draws(np.zeros((3, 2, 2)), present, np.zeros((3, 2), int))
    assert some(draws, 4).present.tolist() == [[True, False]] * 4
    with pytest.raises(InputError, match="none of 2 scenes drawn"):
        some(draws.take([0, 2]), 1)


def test_the_loss_is_that_of_a_loop():
    loss = orbit_loss(find(PROGRAM))
    draws = as_arrays(simulator_of(PROGRAM)(KEY, 4))
    network = guide(num_parts=3)
    all_logits = network.match_logits(Scene(*(np.asarray(x) for x in draws[:2])))
    expected = []
    for logits, present, part in zip(all_logits, *draws[1:], strict=True):
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected.append(-sum(log_probs[m, int(part[m])] for m in np.flatnonzero(present)))
    np.testing.assert_allclose(
        eqx.filter_jit(loss)(network, draws, KEY), np.mean(expected), rtol=1e-5
    )


def flat(network):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(network) if hasattr(x, "shape")])


def upright_program(size):
    """A triangle of about that size that stands nearly upright."""

    def program(points=None, present=None):
        mean, spread = jnp.array([0.0, 0.0, size, 0.0]), 0.1 * size
        with numpyro.plate("object", 1):
            pose = numpyro.sample("pose", dist.MultivariateNormal(mean, spread**2 * jnp.eye(4)))
        match = numpyro.sample("match", PermutationMatch(jnp.zeros((3, 3))))
        likelihood = MatchedParts(match, pose, PARTS, precision=1e4, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    return program


@pytest.mark.slow
@pytest.mark.long
def test_an_edited_prior_trains_again_says_so_and_is_better_on_its_own_scenes(tmp_path):
    said, steps = [], []

    def get(program):
        settings = TINY._replace(num_steps=100, learning_rate=2e-2)
        report = {"say": said.append, "report": lambda done, total: steps.append(done)}
        return amortise(program, KEY, tmp_path, settings=settings, **report)

    large, small = upright_program(2.0), upright_program(0.2)
    old = get(large)
    assert steps and not said
    steps.clear()
    np.testing.assert_array_equal(flat(get(large)), flat(old))
    assert not steps and not said
    new = get(small)
    assert steps and "has 1 trained guides, but none of this program" in said[0]
    assert len(list(tmp_path.iterdir())) == 2
    draws = as_arrays(simulator_of(small)(jax.random.key(5), 200))
    loss = eqx.filter_jit(orbit_loss(find(small)))
    assert loss(new, draws, KEY) < 0.5 * loss(old, draws, KEY)
    probs = new.match_probs(Scene(*(np.asarray(x) for x in draws[:2])))
    assert (probs.argmax(axis=2) == draws.part)[np.asarray(draws.present)].mean() > 0.8


def test_the_digest_knows_parts_priors_and_settings():
    def name(program=PROGRAM, about="", settings=TINY, key=KEY):
        return digest(program, about, settings, key)

    assert name() == name()
    others = {
        name(functools.partial(constellation, parts=stack(shapes("square")))),
        name(functools.partial(PROGRAM, precision=1e4)),
        name(functools.partial(PROGRAM, match_prior="permutation")),
        name(about="noise"),
        name(settings=TINY._replace(num_steps=31)),
        name(key=jax.random.key(1)),
    }
    assert len(others | {name()}) == 7


def test_the_digest_does_not_depend_on_the_order_of_fields():
    arrays = [np.arange(3), np.eye(2), np.array(1.5)]
    assert _fingerprint(arrays) == _fingerprint(arrays[::-1])
    assert _fingerprint(arrays) != _fingerprint([np.arange(3), np.eye(2), np.array(1.25)])


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match="trained for 5 parts, but the scenes have 4 rows"):
        guide().match_logits(scenes(rows=4))
    with pytest.raises(InputError, match="a simulator requires a description"):
        amortise(PROGRAM, KEY, tmp_path, simulator=simulator_of(PROGRAM))
    with pytest.raises(InputError, match="training steps must be 1 to 100,000,000, got 0"):
        fit(PROGRAM, KEY, settings=TINY._replace(num_steps=0))
    path = tmp_path / "weights.eqx"
    with pytest.raises(InputError, match="not a readable file of weights"):
        load_guide(path)
    path.write_bytes(b"\x80 nonsense\n")
    with pytest.raises(InputError, match="it is damaged, or not a file of weights"):
        load_guide(path)
    training.save(path, {"kind": "ccae"}, jnp.zeros(2))
    with pytest.raises(InputError, match="the weights of 'ccae', but those of 'amortised'"):
        load_guide(path)
    header = {"kind": "amortised", "shape": [2, 5], "size": Size()._asdict()}
    training.save(path, header, jnp.zeros(2))
    with pytest.raises(InputError, match="cannot be used"):
        load_guide(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="it is damaged, or not a file of weights"):
        load_guide(path)
