"""A fuzzer: files, kept answers and options of all kinds give a right answer or one sentence.

500 inputs in `make test`, 20,000 by `make fuzz` (CAPSULES_FUZZ), always the same ones. What is
right is known by construction: of a spoilt file the values that it had, of a text those that it was
made of.
"""

import io
import json
import math
import os
import resource
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from typer.testing import CliRunner

from capsules import batch, cli, methods
from capsules.batch import Job, Work
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile, load_scenes, read_scene, stored_scene
from capsules.files.outputs import save_scenes
from capsules.store import Store
from models.errors import InputError
from tests.capsules.stand_in import quick

INPUTS = int(os.environ.get("CAPSULES_FUZZ", "500"))
MEMORY = 2 << 30
"""What docs/scale.md says that a command takes at most."""

SCENES = sample_scenes(20, sigma=0.1, seed=0)


def fuzz(share):
    """Settings for a share of all inputs."""
    return settings(
        max_examples=round(share * INPUTS),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def bounded():
    """Memory within twice the limit, whatever the inputs were."""
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * MEMORY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def answer_of(call, *arguments):
    """What a call returns, or None where it refuses in a sentence."""
    try:
        return call(*arguments)
    except InputError as error:
        assert "\n" not in str(error)
        return None


def assert_equal(found, wanted):
    for name in ("points", "present", "object"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


@st.composite
def spoilt(draw, content):
    """Content with some bits flipped, bytes replaced, a piece cut out, doubled or torn off."""
    content = bytearray(content)
    for kind in draw(st.lists(st.sampled_from("fffrcdt"), min_size=1, max_size=3)):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        size = draw(st.integers(1, 40))
        if kind == "f" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "r":
            content[place : place + size] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "c":
            del content[place : place + size]
        elif kind == "d":
            content[place:place] = content[place : place + size]
        else:
            del content[place:]
    return bytes(content)


# --- npz ----------------------------------------------------------------------------------------


def npz(save):
    buffer = io.BytesIO()
    save(buffer, points=SCENES.points, present=SCENES.present, object=SCENES.object)
    return buffer.getvalue()


FILES = [npz(np.savez), npz(np.savez_compressed)]


@fuzz(0.3)
@given(content=st.sampled_from(FILES).flatmap(spoilt))
def test_a_spoilt_scene_file(folder, content):
    path = folder / "spoilt.npz"
    path.write_bytes(content)
    if (whole := answer_of(load_scenes, path)) is not None:
        if whole.object is None:
            whole = whole._replace(object=SCENES.object)
        assert_equal(whole, SCENES)
    if (one := answer_of(stored_scene, path, 3)) is not None:
        np.testing.assert_array_equal(one.points, SCENES.points[3])


sides = st.integers(0, 12) | st.sampled_from([-1, 1 << 31, 1 << 62, 10**30])
types = ["<f8", "|b1", "<i4", ">f4", "|V8", "|O", "|S3", "<M8[s]", "[('a', '<f8')]", "x", "<c16"]


@st.composite
def members(draw):
    """An array file with a header of its own, true or not."""
    shape = draw(st.tuples(sides, sides, sides) | st.lists(sides, max_size=4).map(tuple))
    descr = draw(st.sampled_from(types))
    header = f"{{'descr': {descr!r}, 'fortran_order': {draw(st.booleans())}, 'shape': {shape}}}"
    header = header if draw(st.integers(0, 9)) else draw(st.text("{}':,()[] 01x", max_size=30))
    size = math.prod(max(side, 0) for side in shape) * 8
    content = bytes(min(size, 5000) if draw(st.booleans()) else draw(st.integers(0, 300)))
    version = draw(st.sampled_from([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x07\x07"]))
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + content


@fuzz(0.1)
@given(
    st.dictionaries(
        st.sampled_from(["points.npy", "present.npy", "object.npy", "points", "x\n.npy"]),
        members() | arrays.arrays(float, (2, 3, 2)).map(lambda x: npy(x)),
    ),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]),
)
def test_any_arrays(folder, content, compression):
    path = folder / "any.npz"
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, text in content.items():
            file.writestr(name, text)
    if (scenes := answer_of(load_scenes, path)) is not None:
        assert np.isfinite(scenes.points).all() and scenes.present.any(axis=1).all()
    answer_of(stored_scene, path, 0)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


# --- text ---------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3).map(repr) | st.integers(-99, 99).map(str) | st.just("+.5E-1")
wrong_numbers = ["", "O.1", "1_0", "0x1", "1;5", "١", "1 2", "--1", "e5", ".", "1e", '"', "\0"]
NAMES = ["x", "y_1", "Länge", "X"]
names = st.sampled_from(NAMES)


@fuzz(0.2)
@given(
    rows=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=13),
    heading=st.none() | st.tuples(names, names) | st.tuples(names, numbers),
    wrong=st.none() | st.tuples(st.integers(0, 12), st.sampled_from(wrong_numbers)),
    mark=st.sampled_from(["", "\ufeff"]),
    end=st.sampled_from(["\n", "\r\n", " \n", "\n\n"]),
)
def test_points_as_csv(folder, rows, heading, wrong, mark, end):
    lines = [list(row) for row in rows]
    if wrong is not None:
        lines[wrong[0] % len(lines)][1] = wrong[1]
    head = [] if heading is None else [list(heading)]
    text = mark + "".join(",".join(line) + end for line in head + lines)
    (folder / "a.csv").write_text(text, newline="")
    found = answer_of(read_scene, folder / "a.csv", 0, 13)
    right = wrong is None and (heading is None or heading[1] in NAMES)
    assert (found is not None) == right
    if found is not None:
        wanted = np.array([[float(x) for x in row] for row in rows])
        np.testing.assert_array_equal(found.points[found.present], wanted)


scalars = st.floats() | st.integers() | st.text(max_size=4) | st.none() | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
points = st.lists(st.lists(st.floats(-2, 2) | scalars, min_size=2, max_size=2), max_size=13)


@fuzz(0.2)
@given(content=values | points | points.map(lambda rows: {"points": rows}), data=st.data())
def test_points_as_json(folder, content, data):
    text = json.dumps(content).encode()
    text = data.draw(spoilt(text)) if data.draw(st.booleans()) else text
    (folder / "a.json").write_bytes(text)
    found = answer_of(read_scene, folder / "a.json", 0, 13)
    if found is not None:
        content = json.loads(text.decode("utf-8-sig"))
        rows = content["points"] if isinstance(content, dict) else content
        assert all(type(x) in (int, float) for row in rows for x in row)
        np.testing.assert_array_equal(found.points[found.present], np.array(rows, float))


# --- what is kept -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(folder):
    """A store with all parts of a file and their manifest; what is in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "BLOCK", 8)
        ransac = methods.METHODS["ransac"]._replace(run=quick)
        patch.setitem(methods.METHODS, "ransac", ransac)
        save_scenes(folder / "scenes.npz", SCENES)
        (folder / "out").mkdir()
        with SceneFile(folder / "scenes.npz") as file:
            work = Work(Job("ransac", 0, {}), file, Store(folder / "out"))
            list(work.results())
            work.write_manifest()
            yield work, {path: path.read_bytes() for path in (folder / "out").iterdir()}


@fuzz(0.1)
@given(data=st.data())
def test_a_spoilt_store(kept, data):
    work, wanted = kept
    path = data.draw(st.sampled_from(sorted(wanted)))
    other = data.draw(st.sampled_from(sorted(wanted)))
    content = data.draw(st.just(wanted[other]) | st.binary(max_size=99) | spoilt(wanted[path]))
    path.write_bytes(content)
    results = list(work.results())
    work.write_manifest()
    assert np.concatenate([result.labels for result in results]).shape == SCENES.present.shape
    assert {path: path.read_bytes() for path in wanted} == wanted


# --- options ------------------------------------------------------------------------------------

COUNTS = ["0", "-1", "1", "7", "1e3", "1.5", "nan", str(2**31), str(2**63), "9" * 40, ""]
OPTIONS = {
    **dict.fromkeys(["--seed", "--index", "--restarts", "--clutter", "--rungs"], COUNTS),
    **dict.fromkeys(["--devices", "--workers"], COUNTS),
    "--precision": [*COUNTS, "inf", "1e-320", "1e308"],
    "--visibility": [*COUNTS, "0.9", "inf", "1e-320"],
    "--shapes": ["", ",", "square", "cube", "square," * 200 + "square", "\n", "L,L,L"],
    "--method": ["", "magic", "ransac", "ds\n", "x" * 300],
    "--prior": ["", "magic", "presence", "sized"],
    "--preset": ["", "magic", "paper", "published"],
    "--json": ["-", ".", "/", "", "scenes.npz", "x" * 300, "no/where", "/dev/null"],
    "--plot": [".", "a.png", ".png", "scenes.npz", "no/where.png", "x" * 300 + ".png"],
    "--out": [".", "", "/dev/null", "x" * 300],
    "--cluster": ["", "x"],
}
option = st.sampled_from(sorted(OPTIONS)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(OPTIONS[name]))
)


@fuzz(0.1)
@given(given_options=st.lists(option, min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
def test_any_options(folder, given_options):
    save_scenes(folder / "scenes.npz", SCENES)
    before = (folder / "scenes.npz").read_bytes()
    words = [word for pair in given_options for word in pair]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, method in methods.METHODS.items():
            patch.setitem(methods.METHODS, name, method._replace(run=any_parts))
        result = CliRunner().invoke(cli.app, ["infer", "scenes.npz", *words])
    assert result.exit_code in (0, cli.BAD_INPUT), (words, result.output, result.exception)
    if result.exit_code == cli.BAD_INPUT:
        assert result.stderr.startswith("error: ") or "Usage" in result.stderr, result.stderr
        assert "Traceback" not in result.output
    assert (folder / "scenes.npz").read_bytes() == before
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]


def any_parts(program, scene, *arguments, **options):
    raise InputError("the method was reached")
