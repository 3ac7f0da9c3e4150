"""What the objectives of three algorithms prefer, on the same scenes: the truth or another parse.

Each objective is evaluated at what its own algorithm finds and at what it comes to from the true
match. Where the truth has the higher value and was not found, the search is at fault; where a wrong
parse has the higher value, the objective is.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from benchmarks.report import Pieces, Table, number
from capsules.baselines import dynamic_routing, em_routing
from capsules.baselines.votes import Routed, Votes, Ways, match_probs_of, votes_of, ways_of
from capsules.experiments.generator import sample_scenes
from inference import cavi
from inference.conditions.problem import Problem, read_problem
from inference.diagnostics.metrics import same_partition
from inference.result import partition
from inference.variational.amortised import at_logits
from models.constellation import PARTS, constellation
from models.scenes import Scene

SIGMAS = (0.0, 0.1, 0.25)
DRAWS, SEED, RESTARTS = 128, 20_260, 32
SURE = 30.0
"""Logits of the true match, against zero."""
TIE = 1e-3


class Judged(NamedTuple):
    """The value of an objective at two answers, and whether they are right."""

    found: Float[np.ndarray, " scenes"]
    truth: Float[np.ndarray, " scenes"]
    is_right: Bool[np.ndarray, " scenes"]
    stays_right: Bool[np.ndarray, " scenes"]
    """Whether what comes of the truth is still right."""


def by_elbo(scenes: Scene) -> Judged:
    found = cavi.run(constellation, scenes, jax.random.key(SEED))
    problem = read_problem(constellation, scenes, or_bound=True)
    assert isinstance(problem, Problem)
    logits = SURE * np.eye(PARTS.num_parts) * np.asarray(scenes.present)[..., None]
    truth = at_logits(problem, logits)
    assert found.elbo is not None and truth.elbo is not None
    return Judged(found.elbo, truth.elbo, *(_right(scenes, x.labels) for x in (found, truth)))


Settle = Callable[[Votes, Array], tuple[Float[Array, ""], Routed]]


def by_routing(scenes: Scene, random: Settle, from_truth: Settle) -> Judged:
    ways = ways_of(PARTS)

    @jax.jit
    @jax.vmap
    def values(points: Array, present: Array, key: Array) -> tuple[Array, ...]:
        votes = votes_of(ways, points, present)
        value, runs = jax.vmap(lambda key: random(votes, key))(jax.random.split(key, RESTARTS))
        best = jax.tree.map(lambda x: x[value.argmax()], runs)
        truth_value, truth = from_truth(votes, present)
        probs = (match_probs_of(ways, x.routing, present) for x in (best, truth))
        return value.max(), truth_value, *probs

    keys = jax.random.split(jax.random.key(SEED), len(scenes.points))
    parts = [
        values(scenes.points[some], scenes.present[some], keys[some])
        for some in np.array_split(np.arange(len(keys)), max(1, len(keys) // 16))
    ]
    found, truth, *probs = (np.concatenate(x) for x in zip(*parts, strict=True))
    labels = (partition(x, np.asarray(PARTS.owner), np.asarray(scenes.present)) for x in probs)
    return Judged(found, truth, *(_right(scenes, x) for x in labels))


def by_em_routing(scenes: Scene) -> Judged:
    ways, settings = ways_of(PARTS), em_routing.Settings()
    object = jnp.asarray(ways.object)

    def random(votes: Votes, key: Array) -> tuple[Float[Array, ""], Routed]:
        mean = em_routing.random_votes(key, votes, object, ways.num_objects)
        return em_routing.settle(votes, ways, em_routing.begin_at(mean, settings), settings)

    def from_truth(votes: Votes, present: Array) -> tuple[Float[Array, ""], Routed]:
        routing = true_routing(ways, present)
        capsules = em_routing.m_step(votes, object, ways.num_objects, routing, 0.0, settings)
        begin = em_routing.begin_at(capsules.mean, settings)
        return em_routing.settle(votes, ways, begin, settings)

    return by_routing(scenes, random, from_truth)


def by_dynamic_routing(scenes: Scene) -> Judged:
    ways, settings = ways_of(PARTS), dynamic_routing.Settings()

    def random(votes: Votes, key: Array) -> tuple[Float[Array, ""], Routed]:
        logits = settings.spread * jax.random.normal(key, votes.pose.shape[:2])
        return dynamic_routing.settle(votes, ways, logits, settings)

    def from_truth(votes: Votes, present: Array) -> tuple[Float[Array, ""], Routed]:
        logits = SURE * true_routing(ways, present)
        return dynamic_routing.settle(votes, ways, logits, settings)

    return by_routing(scenes, random, from_truth)


def true_routing(ways: Ways, present: Bool[Array, " N"]) -> Float[Array, "pairs ways"]:
    """Each pair of points of one object goes its true way: row n is part n in these scenes."""
    pairs = np.array(np.triu_indices(PARTS.num_parts, 1)).T
    same = (pairs[:, None] == ways.parts).all(axis=-1)
    return jnp.where(present[pairs].all(axis=1)[:, None], same, False).astype(float)


def _right(scenes: Scene, labels: np.ndarray) -> Bool[np.ndarray, " scenes"]:
    assert scenes.object is not None
    truth = np.where(scenes.present, scenes.object, -1)
    return same_partition(truth, labels)


OBJECTIVES: dict[str, Callable[[Scene], Judged]] = {
    "ELBO (`ds`)": by_elbo,
    "density of votes (EM routing)": by_em_routing,
    "agreement (dynamic routing)": by_dynamic_routing,
}
HEADINGS = (
    "σ",
    "objective",
    "found right",
    "kept right from the truth",
    "truth higher",
    "wrong parse higher",
    "scenes",
)


def pieces() -> Pieces:
    """Shares of scenes, for each objective."""
    yield Table("objectives", HEADINGS, rows())


def rows() -> Iterator[list[str]]:
    """What became of the scenes of each level of noise, by each objective."""
    for sigma in SIGMAS:
        scenes = sample_scenes(DRAWS, sigma, SEED)
        for name, judge in OBJECTIVES.items():
            found, truth, right, stays = judge(scenes)
            search_fails = ~right & stays & (truth > found + TIE)
            objective_fails = ~right & (found > truth + TIE)
            shares = (right, stays, search_fails, objective_fails)
            yield [f"{sigma:g}", name, *(number(x.mean()) for x in shares), str(len(right))]
