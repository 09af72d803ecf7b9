"""Drawn street scenes with exact labels: the pictures of the synthetic dataset.

A scene is composed on a canvas with a pinhole camera: sky, ground, houses and gardens along the road, then objects from
far to near. An exposure then turns the drawing into a photograph.
"""

from collections.abc import Callable, Sequence

import cv2
import numpy as np
from numpy.typing import ArrayLike

_HEIGHT, _WIDTH = 128, 256  # of the finished picture, pixels
_FINER = 2  # draw at this multiple of the size and average down, which softens edges like a camera

# Cityscapes label ids
EGO, BORDER, STATIC = 1, 2, 4
ROAD, SIDEWALK, BUILDING, FENCE, POLE, LIGHT, SIGN = 7, 8, 11, 13, 17, 19, 20
VEGETATION, TERRAIN, SKY, PERSON, CAR = 21, 22, 23, 24, 26

_GRAIN = {ROAD: 0.06, SIDEWALK: 0.08, BUILDING: 0.06, FENCE: 0.08, VEGETATION: 0.22, TERRAIN: 0.2, SKY: 0.02}

_PAINTS = ((190, 30, 30), (30, 50, 140), (230, 230, 232), (40, 42, 46), (150, 154, 160), (30, 96, 70), (220, 180, 40))
_SIGNS = (((190, 24, 32), (236, 236, 232)), ((28, 70, 170), (28, 70, 170)), ((240, 240, 236), (236, 196, 30)))
_CLOTHES = ((150, 40, 50), (40, 60, 130), (60, 120, 80), (200, 170, 60), (50, 50, 56), (190, 190, 196))
_FACADES = ((196, 178, 150), (150, 90, 74), (168, 168, 164), (214, 206, 190), (120, 108, 100), (186, 150, 116))


class View:
    """The canvas and its camera. World coordinates in metres: x right, y up from the street, z ahead."""

    def __init__(self, rng: np.random.Generator):
        self.height, self.width = _HEIGHT * _FINER, _WIDTH * _FINER
        self.image = np.zeros((self.height, self.width, 3), np.uint8)
        self.label = np.full((self.height, self.width), SKY, np.uint8)
        self.horizon = self.height * rng.uniform(0.38, 0.47)
        self.centre = self.width * rng.uniform(0.4, 0.6)
        self.camera = rng.uniform(1.5, 2.0)  # metres above the street
        self.focal = self.width * 0.8
        self.haze = np.array([200, 208, 216]) * rng.uniform(0.85, 1.1)
        self.clear = rng.uniform(60, 250)  # metres; haze covers 1 - exp(-z / clear) of a colour
        self.sun = rng.uniform(0.75, 1.0, size=2)  # light on the left and right side of the street

    def pixel(self, x: float, y: float, z: float) -> tuple[int, int]:
        """World to canvas pixels."""
        scale = self.focal / z
        return round(self.centre + x * scale), round(self.horizon + (self.camera - y) * scale)

    def length(self, metres: float, z: float, at_least: int = 1) -> int:
        """Length in canvas pixels: at least `at_least` pixels in the finished picture."""
        return max(round(metres * self.focal / z), at_least * _FINER)

    def colour(self, rgb: ArrayLike, z: float, light: float = 1.0) -> list[float]:
        rgb = np.clip(np.asarray(rgb) * light, 0, 255)
        mixed = self.haze + (rgb - self.haze) * np.exp(-z / self.clear)
        return np.clip(mixed, 0, 255).tolist()

    def polygon(self, points: ArrayLike, rgb: Sequence[float], label: int | None) -> None:
        corners = np.clip(np.asarray(points), -30000, 30000).astype(np.int32)
        cv2.fillPoly(self.image, [corners], rgb)
        if label is not None:
            cv2.fillPoly(self.label, [corners], label)

    def box(
        self, left: float, top: float, right: float, bottom: float, rgb: Sequence[float], label: int | None
    ) -> None:
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], rgb, label)

    def surface(self, corners: Sequence[tuple[float, float, float]], rgb: Sequence[float], label: int | None) -> None:
        """A polygon with corners (x, y, z) in the world."""
        self.polygon([self.pixel(*corner) for corner in corners], rgb, label)

    def wall(
        self, x: float, heights: tuple[float, float], z: tuple[float, float], rgb: Sequence[float], label: int | None
    ) -> None:
        """A rectangle along the street. x, heights, z: metres."""
        (low, high), (near, far) = heights, z
        self.surface([(x, low, near), (x, high, near), (x, high, far), (x, low, far)], rgb, label)

    def ellipse(self, centre: Sequence[float], axes: Sequence[float], rgb: Sequence[float], label: int | None) -> None:
        centre_pixel = tuple(map(round, centre))
        axes_pixels = tuple(map(round, axes))
        cv2.ellipse(self.image, centre_pixel, axes_pixels, 0, 0, 360, rgb, -1)
        if label is not None:
            cv2.ellipse(self.label, centre_pixel, axes_pixels, 0, 0, 360, label, -1)


# Side (-1: left, 1: right) -> distances in metres from x = 0 to the road edge, the sidewalk edge and the lots.
_Sides = dict[int, tuple[float, float, float]]
# Distance ahead z, function that draws the object, position x.
_Placed = tuple[float, Callable[[View, np.random.Generator, float, float], None], float]


def draw_street(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One scene: image uint8 (128, 256, 3) RGB and label uint8 (128, 256) of Cityscapes label ids."""
    view = View(rng)
    _draw_sky(view, rng)
    sides = _draw_ground(view, rng)
    for side, edges in sides.items():
        _draw_lots(view, rng, side, edges)
    objects = [*_street_furniture(rng, sides), *_traffic(rng, sides), *_walkers(rng, sides)]
    for z, draw, x in sorted(objects, key=lambda placed: -placed[0]):
        draw(view, rng, x, z)
    if rng.random() < 0.6:
        _draw_bonnet(view, rng)
    return expose(view, rng)


def _draw_sky(view: View, rng: np.random.Generator) -> None:
    """Draw sky and clouds, then houses and trees at the far end of the street."""
    top = np.array([[90, 140, 205], [150, 160, 172], [196, 204, 212], [120, 150, 190]])[rng.integers(4)]
    share = np.linspace(0, 1, view.height)[:, None, None] ** 0.7
    view.image[:] = np.clip(top + (view.haze - top) * share * 1.3, 0, 255)
    for _ in range(rng.integers(0, 6)):
        centre = (rng.uniform(0, view.width), rng.uniform(0, view.horizon * 0.8))
        view.ellipse(centre, (rng.uniform(20, 70), rng.uniform(4, 12)), (view.haze * 1.1).clip(0, 255).tolist(), None)
    x = -60.0
    while x < 60:
        width, height = rng.uniform(6, 16), rng.uniform(3, 11)
        left, top_row = view.pixel(x, height, 95)
        right, bottom = view.pixel(x + width, 0, 95)
        if rng.random() < 0.5:
            view.box(left, top_row, right, bottom, view.colour(_FACADES[rng.integers(6)], 95), BUILDING)
        else:
            colour = view.colour((70, 104, 50), 95)
            view.ellipse(((left + right) / 2, bottom), ((right - left) * 0.7, bottom - top_row), colour, VEGETATION)
        x += width


def _draw_ground(view: View, rng: np.random.Generator) -> _Sides:
    """Draw grass, sidewalks, road and markings."""
    near, far = 2.0, 95.0

    def strip(x0: float, x1: float, rgb: ArrayLike, label: int | None, z0: float = near, z1: float = far) -> None:
        corners = [(x0, 0, z0), (x0, 0, z1), (x1, 0, z1), (x1, 0, z0)]
        view.surface(corners, view.colour(rgb, (z0 * z1) ** 0.5 / 2), label)

    strip(-300, 300, (104, 128, 66), TERRAIN)
    sides = {}
    grey = rng.uniform(82, 112)
    paving = np.array([grey * 1.5, grey * 1.42, grey * 1.36])
    for side in (-1, 1):
        road = rng.uniform(3.2, 6.0)
        walk = road + rng.uniform(1.8, 3.2)
        lots = walk + (rng.uniform(2.0, 6.0) if rng.random() < 0.65 else 0.0)
        strip(side * road, side * walk, paving * rng.uniform(0.92, 1.08), SIDEWALK)
        sides[side] = (road, walk, lots)
    strip(-sides[-1][0], sides[1][0], (grey, grey, grey * 1.03), ROAD)
    for side in (-1, 1):
        road = sides[side][0]
        strip(side * (road - 0.05), side * (road + 0.15), (186, 184, 180), SIDEWALK)  # the kerb
    middle = (sides[1][0] - sides[-1][0]) / 2
    z = rng.uniform(3, 6)
    while z < 60:
        strip(middle - 0.08, middle + 0.08, (226, 226, 220), ROAD, z, z + 2.5)
        z += 5.5
    if rng.random() < 0.35:  # a crossing
        z = rng.uniform(8, 16)
        for x in _steps(-sides[-1][0] + 0.4, sides[1][0] - 0.6, 1.0):
            strip(x, x + 0.5, (220, 220, 216), ROAD, z, z + 2.5)
    return sides


def _draw_lots(view: View, rng: np.random.Generator, side: int, edges: tuple[float, float, float]) -> None:
    """Draw houses, and gardens behind fences, along one side, from far to near."""
    lots = edges[2]
    z = 4.0
    row = []
    while z < 85:
        length = rng.uniform(7, 18)
        row.append((z, z + length, rng.random() < 0.68))
        z += length
    for z0, z1, is_house in reversed(row):
        if is_house:
            _draw_house(view, rng, side, lots, z0, z1)
        else:
            for z in _steps(z1, z0, -2.5):
                _draw_bush(view, rng, side * (lots + rng.uniform(3.5, 6)), z + 1)
            if rng.random() < 0.75:
                _draw_fence(view, rng, side, lots, z0, z1)


def _draw_house(view: View, rng: np.random.Generator, side: int, x: float, z0: float, z1: float) -> None:
    """Draw a house from `z0` to `z1`, `x` metres from the middle; with windows, unless it is far away."""
    wall = np.array(_FACADES[rng.integers(len(_FACADES))]) * rng.uniform(0.8, 1.1)
    height = 3.0 * rng.integers(2, 6) + 1.0
    light = view.sun[(side + 1) // 2]
    inner, outer = side * x, side * (x + 12)
    front = [(inner, 0, z0), (inner, height, z0), (outer, height, z0), (outer, 0, z0)]
    view.surface(front, view.colour(wall, z0, light * 0.8), BUILDING)
    view.wall(inner, (0, height), (z0, z1), view.colour(wall, (z0 + z1) / 2, light), BUILDING)
    if z0 > 60:
        return
    glass = np.array([70, 84, 100]) * rng.uniform(0.6, 1.5)
    for y in _steps(1.0, height - 1.8, 3.0):
        for z in _steps(z0 + 0.8, z1 - 1.4, 2.6):
            view.wall(inner, (y, y + 1.6), (z, z + 1.3), view.colour(glass * rng.uniform(0.8, 1.2), z), None)


def _draw_fence(view: View, rng: np.random.Generator, side: int, x: float, z0: float, z1: float) -> None:
    wood = np.array(((150, 112, 76), (112, 84, 62), (176, 150, 118))[rng.integers(3)]) * view.sun[(side + 1) // 2]
    height = rng.uniform(1.5, 2.0)
    view.wall(side * x, (0, height), (z0, z1), view.colour(wood, (z0 + z1) / 2), FENCE)
    for z in _steps(z0, z1, 0.5):  # the gaps
        view.wall(side * x, (0, height), (z, z + 0.15), view.colour(wood * 0.55, z), None)


def _draw_bush(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    for _ in range(4):
        green = np.array([66, 100, 44]) * rng.uniform(0.65, 1.35)
        centre = view.pixel(x + rng.uniform(-1.5, 1.5), rng.uniform(0.8, 3.2), z)
        axes = (view.length(rng.uniform(1.0, 1.8), z), view.length(rng.uniform(1.0, 2.0), z))
        view.ellipse(centre, axes, view.colour(green, z), VEGETATION)


def _street_furniture(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    """Trees, signs, lights, lamps and bins on the sidewalks."""
    placed: list[_Placed] = []
    for side, (road, walk, _) in sides.items():
        for z in _steps(rng.uniform(8, 14), 45, rng.uniform(8, 16)):
            if rng.random() < 0.6:
                placed.append((z, draw_tree, side * (walk + 0.4)))
        places = _steps(rng.uniform(7, 11), 26, rng.uniform(5, 9))
        placed += [(z, (draw_sign, draw_light, draw_lamp)[rng.integers(3)], side * (road + 0.5)) for z in places]
        if rng.random() < 0.3:
            placed.append((rng.uniform(8, 15), draw_bin, side * (walk - 0.5)))
    return placed


def _traffic(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    """Cars on both lanes, and parked ones along wide roads."""
    placed = [(z, sides[1][0] * 0.4) for z in _steps(rng.uniform(9, 30), 50, rng.uniform(9, 20))]
    placed += [(z, -sides[-1][0] * 0.35) for z in _steps(rng.uniform(7, 30), 50, rng.uniform(10, 20))]
    for side, (road, _, _) in sides.items():
        if road > 4.6 and rng.random() < 0.8:  # room to park
            first, last = rng.uniform(6, 12), rng.uniform(20, 45)
            placed += [(z, side * (road - 1.0)) for z in _steps(first, last, rng.uniform(5.2, 9))]
    return [(z, draw_car, x) for z, x in placed]


def _walkers(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    """Persons on the sidewalks, and sometimes one on the road."""
    placed = []
    for side, (road, walk, _) in sides.items():
        for _ in range(rng.integers(1, 4)):
            placed.append((rng.uniform(6.5, 18), side * rng.uniform(road + 0.6, walk - 0.3)))
    if rng.random() < 0.3:
        placed.append((rng.uniform(8, 16), rng.uniform(-sides[-1][0], sides[1][0])))
    return [(z, draw_person, x) for z, x in placed]


def _draw_bonnet(view: View, rng: np.random.Generator) -> None:
    """Draw the bonnet of the car that carries the camera."""
    centre = (view.width / 2 + rng.uniform(-20, 20), view.height)
    axes = (view.width * rng.uniform(0.4, 0.6), view.height * rng.uniform(0.05, 0.1))
    view.ellipse(centre, axes, (np.array([44, 46, 52]) * rng.uniform(0.7, 2.0)).tolist(), EGO)


def _steps(start: float, stop: float, step: float) -> list[float]:
    """From `start` up to but not including `stop`."""
    return np.arange(start, stop, step).tolist()


def draw_tree(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    (middle, bottom), (_, top) = view.pixel(x, 0, z), view.pixel(x, 3.0, z)
    half = view.length(0.15, z)
    view.box(middle - half, top, middle + half, bottom, view.colour((84, 66, 50), z), VEGETATION)
    for _ in range(9):
        green = np.array([74, 112, 46]) * rng.uniform(0.65, 1.35)
        centre = view.pixel(x + rng.uniform(-1.0, 1.0), rng.uniform(2.9, 5.2), z)
        view.ellipse(centre, (view.length(0.9, z), view.length(0.8, z)), view.colour(green, z), VEGETATION)


def _draw_pole(view: View, x: float, z: float, height: float) -> None:
    (middle, bottom), (_, top) = view.pixel(x, 0, z), view.pixel(x, height, z)
    half = view.length(0.09, z, at_least=2)  # at least 4 pixels wide in the finished picture
    view.box(middle - half, top, middle + half, bottom, view.colour((104, 108, 112), z), POLE)
    view.box(middle - half, top, middle - half // 3, bottom, view.colour((140, 144, 148), z), None)


def draw_lamp(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    _draw_pole(view, x, z, 5.5)
    (end, top), (pole, bottom) = view.pixel(x - np.sign(x) * 1.2, 5.7, z), view.pixel(x, 5.4, z)
    view.box(min(end, pole), top, max(end, pole), bottom, view.colour((120, 122, 124), z), POLE)


def draw_sign(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    """A traffic sign on a pole."""
    _draw_pole(view, x, z, 2.6)
    centre = np.array(view.pixel(x, 2.5, z))
    radius = view.length(0.42, z, at_least=4)
    rim, plate = _SIGNS[rng.integers(len(_SIGNS))]
    corners = (3, 4, 24)[rng.integers(3)]
    turn = np.pi / 2 if corners == 3 else np.pi / 4
    angles = np.arange(corners) * 2 * np.pi / corners - turn
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    view.polygon(centre + circle * radius * 1.1, view.colour(rim, z), SIGN)
    view.polygon(centre + circle * radius * 0.7, view.colour(plate, z), SIGN)


def draw_light(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    """A traffic light on a pole, one of its lamps lit."""
    _draw_pole(view, x, z, 2.6)
    cx, bottom = view.pixel(x, 2.3, z)
    half = view.length(0.28, z, at_least=4)
    top = bottom - 5 * half
    view.box(cx - half, top, cx + half, bottom, view.colour((24, 26, 28), z), LIGHT)
    lit = rng.integers(3)
    for lamp, rgb in enumerate(((255, 40, 30), (255, 190, 30), (40, 240, 120))):
        colour = view.colour(rgb if lamp == lit else (58, 56, 54), z)
        view.ellipse((cx, top + half * (0.9 + 1.6 * lamp)), (half * 0.65, half * 0.65), colour, None)


def draw_bin(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    """A waste bin."""
    left, top = view.pixel(x - 0.35, 1.1, z)
    right, bottom = view.pixel(x + 0.35, 0, z)
    view.box(left, top, right, bottom, view.colour((60, 70, 62), z), STATIC)


def draw_car(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    """A car: from behind on the right, from the front on the left."""
    paint = np.array(_PAINTS[rng.integers(len(_PAINTS))]) * rng.uniform(0.8, 1.1)

    def draw_part(
        x0: float, x1: float, y0: float, y1: float, rgb: ArrayLike, label: int | None, narrower: float = 0.0
    ) -> None:
        corners = [(x + x0, y0, z), (x + x1, y0, z), (x + x1 - narrower, y1, z), (x + x0 + narrower, y1, z)]
        view.surface(corners, view.colour(rgb, z), label)

    shadow = [(x - 1.0, 0, z - 0.4), (x + 1.0, 0, z - 0.4), (x + 0.9, 0, z + 1), (x - 0.9, 0, z + 1)]
    view.surface(shadow, view.colour((34, 34, 36), z), None)
    for wheel_x in (-0.85, 0.6):
        draw_part(wheel_x, wheel_x + 0.25, 0.0, 0.5, (22, 22, 24), CAR)
    draw_part(-0.9, 0.9, 0.25, 0.95, paint, CAR)  # body
    draw_part(-0.85, 0.85, 0.95, 1.5, paint * 0.85, CAR, narrower=0.2)  # cabin
    draw_part(-0.72, 0.72, 1.0, 1.42, (52, 62, 74), None, narrower=0.14)  # window
    lamp_colour = (200, 24, 24) if x > 0 else (250, 246, 220)  # traffic keeps right: tail lamps, or headlamps
    for lamp_x in (-0.85, 0.55):
        draw_part(lamp_x, lamp_x + 0.3, 0.68, 0.86, lamp_colour, None)
    draw_part(-0.3, 0.3, 0.42, 0.58, (226, 226, 220), None)  # number plate


def draw_person(view: View, rng: np.random.Generator, x: float, z: float) -> None:
    """A walking person."""
    height = rng.uniform(1.55, 1.9)
    coat, legs = (np.array(_CLOTHES[rng.integers(len(_CLOTHES))]) for _ in range(2))
    skin = np.array([205, 160, 130]) * rng.uniform(0.5, 1.1)
    stride = rng.uniform(0.05, 0.22)
    for foot in (-stride, stride):
        hip = 0.52 * height
        leg = [(x + foot - 0.09, 0, z), (x + foot + 0.09, 0, z), (x + 0.16, hip, z), (x - 0.16, hip, z)]
        view.surface(leg, view.colour(legs * 0.7, z), PERSON)
    for up, across, tall, rgb in ((0.66, 0.26, 0.2 * height, coat), (0.92, 0.12, 0.15, skin)):  # trunk and head
        axes = view.length(across, z), view.length(tall, z)
        view.ellipse(view.pixel(x, up * height, z), axes, view.colour(rgb, z), PERSON)


def expose(view: View, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Average down to the finished size, then add material grain, light and shade, a colour tint and sensor noise."""
    size = (_WIDTH, _HEIGHT)
    image = cv2.resize(view.image, size, interpolation=cv2.INTER_AREA).astype(np.float32)
    label = np.ascontiguousarray(view.label[_FINER // 2 :: _FINER, _FINER // 2 :: _FINER])  # of pixels' middles
    strength = np.full(256, 0.05, np.float32)
    for material, amount in _GRAIN.items():
        strength[material] = amount
    fine = rng.standard_normal((_HEIGHT, _WIDTH), dtype=np.float32)
    coarse = cv2.resize(rng.standard_normal((_HEIGHT // 8, _WIDTH // 8), dtype=np.float32), size)
    grain = 1 + strength[label] * (0.6 * fine + 0.8 * coarse)
    clouds = 1 + 0.12 * cv2.resize(rng.standard_normal((3, 5), dtype=np.float32), size, interpolation=cv2.INTER_CUBIC)
    tint = rng.uniform(0.9, 1.1, size=3).astype(np.float32) * np.float32(rng.uniform(0.65, 1.15))
    image = image * (grain * clouds)[..., None] * tint
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(rng.uniform(2, 7))
    for edge in (label[:2], label[-2:], label[:, :2], label[:, -2:]):
        edge[:] = BORDER
    return np.clip(image, 0, 255).astype(np.uint8), label
