"""Hostile input: whatever a file holds, a command answers, or says in a sentence why it does not.

Most inputs never reach a method: a cheap one stands in for it, and notes what it was given.
"""

import contextlib
import functools
import json
import os
import re
import resource
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from capsules import cli, methods
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile, load_scenes
from capsules.files.outputs import save_scenes
from capsules.methods import infer
from inference import cavi, exact, gibbs, nuts, ransac, svi
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import InputError
from models.scenes import make_scene
from tests.capsules.stand_in import quick

KEY = jax.random.key(0)
ROOT = Path(__file__).parents[2]
SCENES = sample_scenes(16, sigma=0.1, seed=0)
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@pytest.fixture(autouse=True)
def quick_method(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "ransac", methods.METHODS["ransac"]._replace(run=quick))


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def assert_civil(result):
    """An answer, or one sentence and exit code 2."""
    assert result.exit_code in (0, cli.BAD_INPUT), (result.output, result.exception)
    if result.exit_code:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert result.stdout == ""
    else:
        json.loads(result.stdout, parse_constant=pytest.fail)  # NaN is no JSON


def assert_refused(result, pattern):
    assert_civil(result)
    assert result.exit_code == cli.BAD_INPUT
    assert re.search(pattern, result.stderr), result.stderr


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("deep.json", "[" * 100_000, "does not hold points"),
        ("digits.json", "[[" + "9" * 5000 + ", 1]]", "does not hold points"),
        ("huge.json", "[[1" + "0" * 400 + ", 1]]", "does not hold points"),
        ("field.csv", "1" * 200_000, "does not hold points|NaN or infinite"),
        ("many.csv", "0.1,0.2\n" * 100_000, "has 100000 points but the program has only 11 parts"),
        ("none.csv", "x,y\n", "does not hold points"),
    ],
)
def test_awkward_text_is_refused(tmp_path, name, content, pattern):
    (tmp_path / name).write_text(content)
    assert_refused(run("infer", tmp_path / name, "--method", "ransac", "--json", "-"), pattern)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")  # would wait for ever
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "zero.json").symlink_to("/dev/zero")  # has no end
    for name in ("pipe.csv", "pipe.npz", "zero.json"):
        assert_refused(run("infer", tmp_path / name, "--json", "-"), "it is not an ordinary file")


# --- npz ----------------------------------------------------------------------------------------


def write_with_header(path, shape, dtype="<f8", content=b"\0" * 64, compression=zipfile.ZIP_STORED):
    """A scene file whose `points` are not what their header says."""
    header = str({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr(
            "points.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content
        )
        file.writestr("present.npy", b"")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((10**9, 11, 2), "<f8"),
        ((10**18, 10**18, 10**18), "<f8"),
        ((-1, 11, 2), "<f8"),
        ((2, 2, 2), "|O"),
        ((1, 11, 2), "<f8"),
        ((1, 4, 2), "|V8"),
        ((0, 10**30, 2), "<f8"),
        ((10**30, 0, 10**30), "<f8"),
    ],
)
def test_absurd_headers_are_refused_before_memory_is_taken(tmp_path, shape, dtype):
    path = tmp_path / "a.npz"
    write_with_header(path, shape, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"the header of points says|only plain numbers"):
        SceneFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_bomb_is_not_unpacked(tmp_path):
    """Half a megabyte that unpacks to half a gigabyte of zeros, all of it stated truly."""
    path = tmp_path / "bomb.npz"
    count = 5 * 10**8 // (11 * 2)
    header = str({"descr": "|i1", "fortran_order": False, "shape": (count, 11, 2)}).encode() + b"\n"
    small = str({"descr": "|b1", "fortran_order": False, "shape": (count, 11)}).encode() + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, text, size in (("points", header, 22), ("present", small, 11)):
            with file.open(f"{name}.npy", "w") as out:
                out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
                for _ in range(size):
                    out.write(bytes(count))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InputError, match="it unpacks to 715 MiB, more than 100 times its size"):
        load_scenes(path)
    assert time.monotonic() - began < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_pickles_are_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trap"),))

    np.savez(tmp_path / "a.npz", points=np.array([Trap()]), present=SCENES.present)
    assert_refused(run("infer", tmp_path / "a.npz"), "pickled objects")
    assert not (tmp_path / "trap").exists()


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e-7, 1e5, 1e12, 1e300])
def test_extreme_scales_are_refused_with_what_to_do(tmp_path, scale):
    path = tmp_path / "a.npz"
    save_scenes(path, SCENES._replace(points=SCENES.points * scale))
    assert_refused(run("infer", path, "--method", "ransac", "--json", "-"), "scale the points to")
    assert_refused(
        run("evaluate", path, "--method", "ransac", "--json", "-"), "scale the points to"
    )


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
@pytest.mark.parametrize("method", ["ds", "exact"])
def test_other_scales_have_an_answer(method, scale):
    """With a template of three parts: compiled once for each method."""
    scene = make_scene(np.array([[1.0, 0.3], [0.2, -0.4], [-0.7, 0.6]]) * scale, 3)
    result = infer(method, scene, objects=("triangle",))
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1.0, atol=1e-6)
    assert np.isfinite(result.elbo if result.log_evidence is None else result.log_evidence)
    assert np.isfinite(result.pose_mean).all()


@pytest.mark.parametrize("method", ["ds", "exact"])
def test_repeated_points_have_an_answer(method):
    result = infer(method, make_scene([[0.2, 0.1]] * 3, 3), objects=("triangle",))
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1.0, atol=1e-6)
    assert np.isfinite(result.pose_mean).all()
    np.testing.assert_array_equal(result.labels, [0, 0, 0])


def test_very_many_parts_are_refused_with_the_estimate(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, points=np.zeros((1, 100_000, 2)), present=np.ones((1, 100_000), bool))
    names = ",".join(["square"] * 25_000)
    pattern = r"100,000 parts in all, more than the limit of 512: .* 74\.5 GiB for each run"
    assert_refused(run("infer", path, "--shapes", names, "--json", "-"), pattern)
    assert_refused(run("evaluate", path, "--shapes", names, "--json", "-"), pattern)
    assert_refused(run("infer", path, "--json", "-"), "100,000 rows of 2 features, 1,562 KiB")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "0", "-1"])
def test_odd_precisions_are_refused(tmp_path, value):
    save_scenes(tmp_path / "a.npz", SCENES)
    options = ["--precision", value, "--method", "exact", "--json", "-"]
    assert_refused(
        run("infer", tmp_path / "a.npz", *options),
        "precision must be (positive|at most 1e.12), got",
    )


def odd_program(
    points, present, pose_mean=0.0, pose_variance=1.0, logit=0.0, entry=None, precision=1e4
):
    """Two triangles with numbers that an edit may leave in a prior."""
    parts = methods.templates(("triangle", "triangle"))
    with numpyro.plate("object", 2):
        covariance = pose_variance * jnp.eye(4)
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.full(4, pose_mean), covariance))
    logits = jnp.full((6, 6), logit).at[0, 0].set(logit if entry is None else entry)
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    numpyro.sample("points", likelihood, obs=points)


@pytest.mark.parametrize("method", [cavi, exact, ransac, svi, nuts, gibbs])
@pytest.mark.parametrize("name", ["pose_mean", "pose_variance", "logit", "precision"])
def test_nan_in_a_program_is_named(method, name):
    scene = make_scene(np.random.default_rng(0).normal(size=(6, 2)), 6)
    words = {
        "pose_mean": "MultivariateNormal distribution got invalid loc",
        "pose_variance": "MultivariateNormal distribution got invalid covariance_matrix",
        "logit": "PermutationMatch distribution got invalid logits",
        "precision": "precision must be positive",
    }
    with pytest.raises(InputError, match=words[name]):
        key = () if method is exact else (KEY,)
        method.run(functools.partial(odd_program, **{name: np.nan}), scene, *key)


NUMBERS = {"pose_mean", "pose_variance", "logit", "entry", "precision"}
CLOSED_FORMS = [functools.partial(cavi.run, rng_key=KEY, num_restarts=2), exact.run]


@pytest.mark.long
@pytest.mark.parametrize("value", [1e-12, 1e12, 1e300])
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_in_a_prior_is_answered_or_refused(name, value):
    """By exact inference, which compiles once for all of them."""
    check_number(name, value, exact.run)


@pytest.mark.slow
@settings(FUZZ, max_examples=20)
@given(
    name=st.sampled_from(sorted(NUMBERS)),
    value=st.floats() | st.sampled_from([0.0, -np.inf, 1e-300, 1e-12, 1e12, 1e30, 1e300]),
    method=st.sampled_from(CLOSED_FORMS),
)
def test_any_number_in_a_prior_is_answered_or_refused(name, value, method):
    check_number(name, value, method)


def check_number(name, value, method):
    scene = make_scene(np.random.default_rng(0).normal(size=(5, 2)), 6)
    try:
        result = method(functools.partial(odd_program, **{name: value}), scene)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert np.isfinite(result.elbo if result.log_evidence is None else result.log_evidence)
    assert np.isfinite(result.pose_covariance).all()
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("odd", "pattern"),
    [
        ({"pose_mean": 1e13}, r"site 'pose': 1e\+13 among the numbers .* at most 1e\+12"),
        ({"precision": np.inf}, r"site 'points': inf among the numbers"),
        ({"logit": -np.inf}, r"site 'match': its prior forbids every match"),
        ({"pose_mean": 1e12}, r"numbers of 2\.3e\+14 standard deviations of the noise; .* lower"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(odd, pattern):
    scene = make_scene(np.random.default_rng(0).normal(size=(5, 2)), 6)
    with pytest.raises(InputError, match=pattern):
        exact.run(functools.partial(odd_program, **odd), scene)


def test_a_prior_that_leaves_two_points_one_part_is_refused():
    """Every row and every column has a partner, and yet there is no match."""
    logits = np.zeros((6, 6))
    logits[:2, 1:] = -np.inf

    def program(points, present):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4)))
        match = numpyro.sample("match", PermutationMatch(logits))
        parts = methods.templates(("triangle", "triangle"))
        likelihood = MatchedParts(match, pose, parts, precision=1e4, present=present)
        numpyro.sample("points", likelihood, obs=points)

    scene = make_scene(np.random.default_rng(0).normal(size=(5, 2)), 6)
    with pytest.raises(InputError, match="its prior forbids every match"):
        cavi.run(program, scene, jax.random.key(0))


def test_nan_that_numpyro_lets_pass_is_named():
    scene = make_scene(np.random.default_rng(0).normal(size=(6, 2)), 6)
    with (
        numpyro.distributions.distribution.validation_enabled(False),
        pytest.raises(InputError, match=r"site 'pose': NaN among the numbers of its distribution"),
    ):
        cavi.run(functools.partial(odd_program, pose_mean=np.nan), scene, jax.random.key(0))


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_odd_seeds_are_refused(tmp_path, seed):
    save_scenes(tmp_path / "a.npz", SCENES)
    assert_refused(
        run("infer", tmp_path / "a.npz", "--seed", seed, "--json", "-"), "the seed must be"
    )


# --- outputs ------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "in").mkdir()
    save_scenes(tmp_path / "in" / "a.npz", SCENES)
    return tmp_path / "in" / "a.npz"


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--json", "no/such/folder/out.json"),
        ("--json", "a_file/out.json"),
        ("--plot", "no/such/folder/out.png"),
        ("--plot", "a_file/out.png"),
        ("--out", "a_file/out"),
    ],
)
def test_outputs_that_cannot_be_written_are_explained(tmp_path, stored, option, place):
    (tmp_path / "a_file").touch()
    extra = ["--all"] if option == "--out" else []
    result = run("infer", stored, "--method", "ransac", *extra, option, tmp_path / place)
    assert result.exit_code == cli.BAD_INPUT and "cannot write" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["a_file", "in"]


def test_a_device_is_not_replaced_by_a_file(tmp_path, stored):
    os.mkfifo(tmp_path / "pipe.json")
    result = run("infer", stored, "--method", "ransac", "--json", tmp_path / "pipe.json")
    assert_refused(result, "cannot write .*it is not an ordinary file")
    assert (tmp_path / "pipe.json").is_fifo()


@contextlib.contextmanager
def no_room():
    """No file can grow beyond a hundred bytes, as on a full disk; nor can a log of the tests."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["infer --json", "infer --all", "evaluate", "sample"])
def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, stored, what):
    out = tmp_path / "out"
    arguments = {
        "infer --json": ["infer", stored, "--method", "ransac", "--json", out],
        "infer --all": ["infer", stored, "--method", "ransac", "--all", "--out", out],
        "evaluate": ["evaluate", stored, "--method", "ransac", "--json", out],
        "sample": ["sample", out],
    }[what]
    with no_room():
        result = run(*arguments)
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert re.search(r"cannot write .*File too large", result.stderr), result.stderr
    assert not out.is_file()
    assert not out.is_dir() or not os.listdir(out)
    assert sorted(set(os.listdir(tmp_path)) - {"out", "in"}) == []


def test_a_full_standard_output_is_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "capsules.cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    assert done.returncode == cli.BAD_INPUT
    assert done.stderr == (
        "error: cannot write (No space left on device); make room, or write to another place\n"
    )
