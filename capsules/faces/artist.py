"""A procedural artist who draws part images of faces, by seed.

Each part is drawn from a few numbers, such as the width of the nose or the arch of the brows. A
group of people has its own average of each number, and variants differ from it, so the parts of a
face have in common the tone and the shapes of their group. The drawings are the project's own and
replace photographs that it must not ship.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Float

from capsules.faces.images import CANVAS, PART_TYPES, FaceImages, pixel_grid
from models.errors import InputError

NUM_GROUPS, NUM_VARIANTS = 6, 7

Field = Float[np.ndarray, " pixels"]
Numbers = Mapping[str, float]

_PIXEL = 2.0 / CANVAS

_NUMBERS: dict[str, dict[str, tuple[float, float, float]]] = {
    "hair": {
        "shade": (0.25, 0.13, 0.05),
        "line": (-0.50, 0.04, 0.035),
        "temples": (0.20, 0.04, 0.04),
        "parting": (0.0, 0.12, 0.12),
        "sweep": (0.0, 0.06, 0.05),
        "volume": (0.0, 0.03, 0.025),
        "strands": (0.05, 0.015, 0.015),
    },
    "eyes": {
        "apart": (0.265, 0.014, 0.010),
        "width": (0.125, 0.009, 0.006),
        "open": (0.052, 0.009, 0.006),
        "slant": (0.0, 0.07, 0.05),
        "iris": (0.25, 0.10, 0.08),
        "brow": (0.145, 0.012, 0.010),
        "thick": (0.026, 0.006, 0.005),
        "arch": (0.030, 0.012, 0.012),
        "brow_shade": (0.22, 0.08, 0.05),
        "fold": (0.10, 0.04, 0.04),
    },
    "nose": {
        "width": (0.125, 0.018, 0.014),
        "tip": (0.200, 0.018, 0.016),
        "bridge": (0.050, 0.008, 0.006),
        "nostril": (0.030, 0.005, 0.005),
        "relief": (0.12, 0.04, 0.04),
        "bend": (0.0, 0.006, 0.008),
        "ball": (0.12, 0.05, 0.05),
    },
    "mouth": {
        "width": (0.215, 0.020, 0.016),
        "upper": (0.034, 0.009, 0.006),
        "lower": (0.050, 0.010, 0.007),
        "bow": (0.012, 0.005, 0.005),
        "smile": (0.015, 0.014, 0.014),
        "lips": (0.66, 0.07, 0.05),
        "place": (0.455, 0.008, 0.008),
    },
    "jaw": {
        "width": (0.60, 0.045, 0.03),
        "square": (2.3, 0.25, 0.2),
        "chin": (0.89, 0.035, 0.025),
        "stubble": (0.07, 0.06, 0.035),
        "cheek": (0.08, 0.03, 0.03),
        "cleft": (0.04, 0.025, 0.025),
        "hollow": (0.08, 0.05, 0.05),
    },
}
"""For each number of each part: average, spread over groups, and spread over variants."""

_TONES = (0.46, 0.78)
_TONE_OF_VARIANT = 0.008
_GRAIN = 0.014


@functools.lru_cache(maxsize=4)
def draw_images(
    seed: int = 0, num_groups: int = NUM_GROUPS, num_variants: int = NUM_VARIANTS
) -> FaceImages:
    """Draw a set of part images; the same seed gives the same ones."""
    if seed < 0 or num_groups < 2 or num_variants < 2:
        raise InputError(
            "the artist requires a seed of 0 or more, and at least 2 groups and 2 variants, got "
            f"seed {seed}, {num_groups} groups, {num_variants} variants; try 0, {NUM_GROUPS}, "
            f"{NUM_VARIANTS}"
        )
    rng = np.random.default_rng(seed)
    masks = part_masks()
    x, y = pixel_grid()
    tones = rng.permutation(np.linspace(*_TONES, num_groups))
    pixels = {}
    for name, draw in _DRAW.items():
        mask = masks[PART_TYPES.index(name)]
        overall = {number: spread[0] for number, spread in _NUMBERS[name].items()}
        averages = [_vary(rng, overall, name, 1) for _ in range(num_groups)]
        images = [
            draw(
                x[mask],
                y[mask],
                tone + _TONE_OF_VARIANT * rng.normal(),
                _vary(rng, average, name, 2),
                rng,
            )
            for tone, average in zip(tones, averages, strict=True)
            for _ in range(num_variants)
        ]
        shape = (num_groups, num_variants, -1)
        pixels[name] = np.clip(images, 0, 1).astype(np.float32).reshape(shape)
    return FaceImages(masks, tuple(pixels[name] for name in PART_TYPES))


def part_masks() -> Bool[np.ndarray, "5 224 224"]:
    """The mask of each part type: bands of an oval head, with the nose and the mouth cut out."""
    x, y = pixel_grid()
    head = np.abs(x / 0.70) ** 2.3 + np.abs((y - 0.02) / 0.95) ** 2.3 < 1
    nose = (np.abs(x) < 0.10 + 0.30 * (y + 0.10)) & (np.abs(x) < 0.205) & (y > -0.10) & (y < 0.31)
    mouth = (_around_mouth(x, y) < 1) & (y >= 0.31)
    hair = head & (y < -0.31)
    eyes = head & (y >= -0.31) & (y < 0.06) & ~nose
    jaw = head & (y >= 0.06) & ~nose & ~mouth
    return np.stack([eyes, nose, mouth, jaw, hair])


def _vary(rng: np.random.Generator, average: Numbers, part: str, level: int) -> dict[str, float]:
    """Draw numbers around averages, within two spreads: level 1 over groups, 2 over variants."""
    return {
        name: value + _NUMBERS[part][name][level] * float(np.clip(rng.normal(), -2, 2))
        for name, value in average.items()
    }


def _skin(x: Field, y: Field, tone: float, rng: np.random.Generator) -> Field:
    """Skin lit from the front, a little from the left, with a grain that no two parts share."""
    light = 1.08 - 0.42 * np.abs(x / 0.72) ** 3 - 0.05 * x - 0.10 * np.clip(y, 0, 1) ** 2
    return tone * light + _GRAIN * _clouds(x, y, rng, 9.0)


def _clouds(x: Field, y: Field, rng: np.random.Generator, frequency: float) -> Field:
    """A smooth random field of unit variance: a few waves in random directions."""
    angle, phase = rng.uniform(0, 2 * np.pi, (2, 6))
    waves = [
        np.cos(frequency * (np.cos(a) * x + np.sin(a) * y) + p)
        for a, p in zip(angle, phase, strict=True)
    ]
    return np.sum(waves, axis=0) / np.sqrt(3)


def _inside(distance: Field, softness: float = 1.5) -> Field:
    """1 where a distance is negative, 0 where it is positive, soft over a pixel or so."""
    return 1 / (1 + np.exp(np.clip(distance / (softness * _PIXEL / 4), -50, 50)))


def _over(below: Field, colour: Field | float, cover: Field) -> Field:
    return below + (colour - below) * cover


def _around_mouth(x: Field, y: Field) -> Field:
    """Below 1 within the mask of the mouth, and growing with the distance from it."""
    return (np.abs(x / 0.33) ** 4 + np.abs((y - 0.45) / 0.14) ** 4) ** 0.5


def _hair(x: Field, y: Field, tone: float, n: Numbers, rng: np.random.Generator) -> Field:
    skin = _skin(x, y, tone, rng)
    # The hairline comes down to the temples; the parting and the sweep make it uneven.
    side = np.abs(x - n["parting"]) / 0.7
    hairline = n["line"] + n["temples"] * side**2.6 + n["sweep"] * x
    hairline = np.minimum(hairline - 0.03 * np.exp(-60 * side**2), -0.335)
    angle = np.arctan2(x - n["parting"], 1.15 + y)
    strands = np.sin(38 * angle + rng.uniform(0, 6.3)) + np.sin(61 * angle + rng.uniform(0, 6.3))
    gloss = 0.35 * np.exp(-(((y + 0.70 - 0.25 * x**2) / 0.09) ** 2))
    shade = max(n["shade"], 0.04)
    hair = shade * (1 + gloss) + n["strands"] * strands / 2
    shadow = 1 - 0.20 * np.exp(-np.abs(y - hairline) / 0.04) * np.clip((-0.31 - y) / 0.06, 0, 1)
    image = _over(skin * shadow, hair, _inside(y - hairline, 6))
    # Only the crown varies, so that hair and eyes meet at the same width.
    height = 0.92 + n["volume"] - 0.02 * np.cos(9 * x)
    radius = np.abs(x / 0.70) ** 2.3 + np.abs((y - 0.02) / height) ** 2.3
    return image * _inside((radius - 1) * 0.3, 3)


def _eyes(x: Field, y: Field, tone: float, n: Numbers, rng: np.random.Generator) -> Field:
    image = _skin(x, y, tone, rng)
    for side in (-1, 1):
        u, v = side * x - n["apart"], y + 0.095
        v = v + n["slant"] * u
        socket = np.exp(-((u / 0.15) ** 2) - ((v + 0.02) / 0.09) ** 2)
        image = image * (1 - 0.22 * socket)
        lid = n["open"] * np.clip(1 - (u / n["width"]) ** 2, 0, None) ** 0.7
        ball = _inside(v - 0.75 * lid) * _inside(-v - lid) * _inside(np.abs(u) - n["width"])
        fold = np.exp(-(((v - 0.085 - 0.5 * u**2) / 0.018) ** 2) - (u / 0.12) ** 2)
        image = image * (1 - n["fold"] * fold)
        image = _over(image, 0.90 - 0.18 * np.abs(u / n["width"]), ball)
        r = np.hypot(u, v + 0.005)
        iris = _inside(r - 0.052)
        image = _over(image, max(n["iris"], 0.05), ball * iris)
        image = _over(image, 0.02, ball * _inside(r - 0.022))
        image = _over(image, 0.95, ball * _inside(np.hypot(u + 0.018 * side, v + 0.022) - 0.011))
        lashes = np.abs(v + lid) - 0.010
        image = _over(image, 0.08, 0.9 * _inside(lashes, 2) * _inside(np.abs(u) - n["width"], 4))
        w = u - 0.01
        ridge = v + n["brow"] - 0.02 + n["arch"] * (1 - ((w - 0.04) / 0.12) ** 2)
        taper = n["thick"] * np.clip(1.15 - ((w + 0.04) / 0.21) ** 2, 0, None)
        brow = _inside(np.abs(ridge) - taper, 5) * _inside(np.abs(w) - 0.175, 6)
        image = _over(image, max(n["brow_shade"], 0.04), 0.85 * brow)
    return image


def _nose(x: Field, y: Field, tone: float, n: Numbers, rng: np.random.Generator) -> Field:
    image = _skin(x, y, tone, rng)
    x = x - n["bend"] * np.sin(4 * (y + 0.1))
    down = np.clip((y + 0.15) / (n["tip"] + 0.15), 0, 1)
    half = n["bridge"] + (n["width"] - n["bridge"]) * down**2.5
    flank = np.exp(-(((np.abs(x) - half) / 0.035) ** 2)) * _inside(y - n["tip"] - 0.04, 12)
    relief = n["relief"] * np.clip((y + 0.11) / 0.15, 0, 1)
    image = image * (1 - relief * flank * (1 + 0.6 * np.tanh(x / 0.02)))
    ridge = np.exp(-((x / (0.6 * n["bridge"])) ** 2)) * _inside(y - n["tip"], 8)
    image = image * (1 + 0.9 * relief * ridge)
    tip = np.exp(-((x / 0.06) ** 2) - ((y - n["tip"] + 0.03) / 0.05) ** 2)
    image = image * (1 + n["ball"] * tip)
    under = np.exp(-((x / n["width"]) ** 4) - ((y - n["tip"] - 0.045) / 0.020) ** 2)
    image = image * (1 - 0.30 * under)
    for side in (-1, 1):
        u, v = side * x - 0.52 * n["width"], y - n["tip"] - 0.028
        hole = _inside(np.hypot(u / 1.35, v + 0.25 * u) - 0.75 * n["nostril"], 4)
        image = _over(image, 0.35 * tone, 0.9 * hole)
        wing = np.exp(-(((np.hypot(u - 0.012, v + 0.012) - 1.75 * n["nostril"]) / 0.012) ** 2))
        image = image * (1 - 0.22 * wing * (u > 0))
    return image


def _mouth(x: Field, y: Field, tone: float, n: Numbers, rng: np.random.Generator) -> Field:
    image = _skin(x, y, tone, rng)
    across = np.clip(np.abs(x) / n["width"], 0, 1)
    line = n["place"] - n["smile"] * across**2 * 2 + 0.006 * np.cos(3 * np.pi * across)
    full = np.clip(1 - across**2, 0, None) ** 0.8
    bow = n["bow"] * (np.exp(-(((across - 0.28) / 0.2) ** 2)) - 0.5)
    top = line - (n["upper"] + bow) * full
    bottom = line + n["lower"] * full
    within = _inside(np.abs(x) - n["width"], 3)
    philtrum = np.exp(-((x / 0.035) ** 2)) * _inside(y - top, 6)
    image = image * (1 - 0.10 * philtrum)
    image = image * (1 - 0.20 * np.exp(-((x / 0.15) ** 2) - ((y - bottom - 0.030) / 0.022) ** 2))
    colour = tone * n["lips"]
    shine = 0.16 * np.exp(-((x / 0.10) ** 2) - ((y - line - 0.5 * n["lower"]) / 0.014) ** 2)
    upper = _inside(top - y, 2) * _inside(y - line, 2) * within
    lower = _inside(line - y, 2) * _inside(y - bottom, 2) * within
    image = _over(image, 0.86 * colour, upper)
    image = _over(image, colour * (1 + shine / max(tone, 0.2)), lower)
    return _over(image, 0.35 * tone, within * np.exp(-(((y - line) / 0.008) ** 2)))


def _jaw(x: Field, y: Field, tone: float, n: Numbers, rng: np.random.Generator) -> Field:
    image = _skin(x, y, tone, rng)
    blush = np.exp(-(((np.abs(x) - 0.36) / 0.12) ** 2) - ((y - 0.18) / 0.12) ** 2)
    image = image * (1 + n["cheek"] * blush)
    hollow = np.exp(-(((np.abs(x) - 0.45) / 0.09) ** 2) - ((y - 0.42) / 0.16) ** 2)
    image = image * (1 - n["hollow"] * hollow)
    fold = np.abs(x) - 0.22 - 0.55 * (y - 0.25)
    image = image * (1 - n["cheek"] * np.exp(-((fold / 0.02) ** 2) - ((y - 0.32) / 0.12) ** 2))
    beard = _inside(0.30 + 0.9 * np.clip(0.45 - np.abs(x), 0, None) ** 2 - y, 40)
    beard = beard * (1 - np.exp(-np.clip(_around_mouth(x, y) - 1, 0, None) / 0.5))
    speckle = np.sin(140 * x + 37 * y) * np.sin(31 * x - 150 * y)
    image = image * (1 - np.clip(n["stubble"], 0, None) * beard * (1 + 0.25 * speckle))
    cleft = np.exp(-((x / 0.025) ** 2) - ((y - n["chin"] + 0.10) / 0.05) ** 2)
    image = image * (1 - n["cleft"] * cleft)
    # The outline leaves the oval of the head at the ears and closes under the chin.
    below = np.clip((y - 0.06) / (n["chin"] - 0.06), 0, None)
    half = np.abs(x) / (0.70 + (n["width"] - 0.70) * np.clip(below, 0, 1))
    radius = half ** n["square"] + below ** n["square"]
    shade = 1 - 0.45 * np.clip(below, 0, 1) * np.clip(radius, 0, 1) ** 4
    return image * shade * _inside((radius - 1) * 0.3, 4)


_DRAW: dict[str, Callable[[Field, Field, float, Numbers, np.random.Generator], Field]] = {
    "hair": _hair,
    "eyes": _eyes,
    "nose": _nose,
    "mouth": _mouth,
    "jaw": _jaw,
}
