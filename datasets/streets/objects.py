"""The objects of a street scene, each drawn at its position (x, z) in metres."""

import numpy as np
from numpy.typing import ArrayLike

from datasets.streets.view import CAR, LIGHT, PERSON, POLE, SIGN, STATIC, VEGETATION, View

_PAINTS = ((190, 30, 30), (30, 50, 140), (230, 230, 232), (40, 42, 46), (150, 154, 160), (30, 96, 70), (220, 180, 40))
_SIGNS = (((190, 24, 32), (236, 236, 232)), ((28, 70, 170), (28, 70, 170)), ((240, 240, 236), (236, 196, 30)))
_CLOTHES = ((150, 40, 50), (40, 60, 130), (60, 120, 80), (200, 170, 60), (50, 50, 56), (190, 190, 196))


def draw_tree(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    (middle, bottom), (_, top) = view.at(x, 0, z), view.at(x, 3.0, z)
    half = view.length(0.15, z)
    view.box(middle - half, top, middle + half, bottom, view.colour((84, 66, 50), z), VEGETATION)
    for _ in range(9):
        green = np.array([74, 112, 46]) * rng.uniform(0.65, 1.35)
        centre = view.at(x + rng.uniform(-1.0, 1.0), rng.uniform(2.9, 5.2), z)
        view.ellipse(centre, (view.length(0.9, z), view.length(0.8, z)), view.colour(green, z), VEGETATION)


def _draw_pole(view: View, x: float, z: float, height: float) -> None:
    (middle, bottom), (_, top) = view.at(x, 0, z), view.at(x, height, z)
    half = view.length(0.09, z, at_least=2)  # at least 4 pixels wide in the finished picture
    view.box(middle - half, top, middle + half, bottom, view.colour((104, 108, 112), z), POLE)
    view.box(middle - half, top, middle - half // 3, bottom, view.colour((140, 144, 148), z), None)


def draw_lamp(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    _draw_pole(view, x, z, 5.5)
    (end, top), (pole, bottom) = view.at(x - np.sign(x) * 1.2, 5.7, z), view.at(x, 5.4, z)
    view.box(min(end, pole), top, max(end, pole), bottom, view.colour((120, 122, 124), z), POLE)


def draw_sign(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    _draw_pole(view, x, z, 2.6)
    centre = np.array(view.at(x, 2.5, z))
    radius = view.length(0.42, z, at_least=4)
    rim, plate = _SIGNS[rng.integers(len(_SIGNS))]
    corners = (3, 4, 24)[rng.integers(3)]
    turn = np.pi / 2 if corners == 3 else np.pi / 4
    angles = np.arange(corners) * 2 * np.pi / corners - turn
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    view.polygon(centre + circle * radius * 1.1, view.colour(rim, z), SIGN)
    view.polygon(centre + circle * radius * 0.7, view.colour(plate, z), SIGN)


def draw_light(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    _draw_pole(view, x, z, 2.6)
    cx, bottom = view.at(x, 2.3, z)
    half = view.length(0.28, z, at_least=4)
    top = bottom - 5 * half
    view.box(cx - half, top, cx + half, bottom, view.colour((24, 26, 28), z), LIGHT)
    lit = rng.integers(3)
    for lamp, rgb in enumerate(((255, 40, 30), (255, 190, 30), (40, 240, 120))):
        colour = view.colour(rgb if lamp == lit else (58, 56, 54), z)
        view.ellipse((cx, top + half * (0.9 + 1.6 * lamp)), (half * 0.65, half * 0.65), colour, None)


def draw_bin(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    left, top = view.at(x - 0.35, 1.1, z)
    right, bottom = view.at(x + 0.35, 0, z)
    view.box(left, top, right, bottom, view.colour((60, 70, 62), z), STATIC)


def draw_car(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    paint = np.array(_PAINTS[rng.integers(len(_PAINTS))]) * rng.uniform(0.8, 1.1)

    def part(
        x0: float, x1: float, y0: float, y1: float, rgb: ArrayLike, label: int | None, narrower: float = 0.0
    ) -> None:
        points = [view.at(x + x0, y0, z), view.at(x + x1, y0, z)]
        points += [view.at(x + x1 - narrower, y1, z), view.at(x + x0 + narrower, y1, z)]
        view.polygon(points, view.colour(rgb, z), label)

    ground = ((x - 1.0, z - 0.4), (x + 1.0, z - 0.4), (x + 0.9, z + 1), (x - 0.9, z + 1))
    shadow = [view.at(across, 0, ahead) for across, ahead in ground]
    view.polygon(shadow, view.colour((34, 34, 36), z), None)
    for wheel in (-0.85, 0.6):
        part(wheel, wheel + 0.25, 0.0, 0.5, (22, 22, 24), CAR)
    part(-0.9, 0.9, 0.25, 0.95, paint, CAR)
    part(-0.85, 0.85, 0.95, 1.5, paint * 0.85, CAR, narrower=0.2)
    part(-0.72, 0.72, 1.0, 1.42, (52, 62, 74), None, narrower=0.14)
    lamps = (200, 24, 24) if x > 0 else (250, 246, 220)
    for lamp in (-0.85, 0.55):
        part(lamp, lamp + 0.3, 0.68, 0.86, lamps, None)
    part(-0.3, 0.3, 0.42, 0.58, (226, 226, 220), None)


def draw_person(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    height = rng.uniform(1.55, 1.9)
    coat, legs = (np.array(_CLOTHES[rng.integers(len(_CLOTHES))]) for _ in range(2))
    skin = np.array([205, 160, 130]) * rng.uniform(0.5, 1.1)
    stride = rng.uniform(0.05, 0.22)
    for foot in (-stride, stride):
        points = [view.at(x + foot - 0.09, 0, z), view.at(x + foot + 0.09, 0, z)]
        points += [view.at(x + 0.16, 0.52 * height, z), view.at(x - 0.16, 0.52 * height, z)]
        view.polygon(points, view.colour(legs * 0.7, z), PERSON)
    for up, across, tall, rgb in ((0.66, 0.26, 0.2 * height, coat), (0.92, 0.12, 0.15, skin)):  # trunk and head
        axes = view.length(across, z), view.length(tall, z)
        view.ellipse(view.at(x, up * height, z), axes, view.colour(rgb, z), PERSON)
