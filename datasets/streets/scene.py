"""Composes a street scene: sky, ground, houses and gardens along the road, then objects from far to near."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from datasets.streets.objects import draw_bin, draw_car, draw_lamp, draw_light, draw_person, draw_sign, draw_tree
from datasets.streets.view import BUILDING, EGO, FENCE, ROAD, SIDEWALK, TERRAIN, VEGETATION, View, expose

# Side (-1: left, 1: right) -> distances in metres from x = 0 to the road edge, the sidewalk edge and the lots.
_Sides = dict[int, tuple[float, float, float]]
# Distance ahead z, function that draws the object, position x.
_Placed = tuple[float, Callable[[View, np.random.Generator, float, float], None], float]

_FACADES = ((196, 178, 150), (150, 90, 74), (168, 168, 164), (214, 206, 190), (120, 108, 100), (186, 150, 116))


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
    top = np.array([[90, 140, 205], [150, 160, 172], [196, 204, 212], [120, 150, 190]])[rng.integers(4)]
    share = np.linspace(0, 1, view.height)[:, None, None] ** 0.7
    view.image[:] = np.clip(top + (view.haze - top) * share * 1.3, 0, 255)
    for _ in range(rng.integers(0, 6)):
        centre = (rng.uniform(0, view.width), rng.uniform(0, view.horizon * 0.8))
        view.ellipse(centre, (rng.uniform(20, 70), rng.uniform(4, 12)), (view.haze * 1.1).clip(0, 255).tolist(), None)
    x = -60.0
    while x < 60:  # the far end of the street
        width, height = rng.uniform(6, 16), rng.uniform(3, 11)
        left, top_row = view.at(x, height, 95)
        right, bottom = view.at(x + width, 0, 95)
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
        points = [view.at(x0, 0, z0), view.at(x0, 0, z1), view.at(x1, 0, z1), view.at(x1, 0, z0)]
        view.polygon(points, view.colour(rgb, (z0 * z1) ** 0.5 / 2), label)

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
    lots, z = edges[2], 4.0
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
    wall = np.array(_FACADES[rng.integers(len(_FACADES))]) * rng.uniform(0.8, 1.1)
    height = 3.0 * rng.integers(2, 6) + 1.0
    light = view.sun[(side + 1) // 2]
    inner, outer = side * x, side * (x + 12)
    front = [view.at(inner, 0, z0), view.at(inner, height, z0), view.at(outer, height, z0), view.at(outer, 0, z0)]
    view.polygon(front, view.colour(wall, z0, light * 0.8), BUILDING)
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
        centre = view.at(x + rng.uniform(-1.5, 1.5), rng.uniform(0.8, 3.2), z)
        axes = (view.length(rng.uniform(1.0, 1.8), z), view.length(rng.uniform(1.0, 2.0), z))
        view.ellipse(centre, axes, view.colour(green, z), VEGETATION)


def _street_furniture(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    placed: list[_Placed] = []
    for side, (road, walk, _) in sides.items():
        for z in _steps(rng.uniform(8, 14), 45, rng.uniform(8, 16)):
            if rng.random() < 0.6:
                placed.append((z, draw_tree, side * (walk + 0.4)))
        for z in _steps(rng.uniform(7, 11), 26, rng.uniform(5, 9)):
            placed.append((z, (draw_sign, draw_light, draw_lamp)[rng.integers(3)], side * (road + 0.5)))
        if rng.random() < 0.3:
            placed.append((rng.uniform(8, 15), draw_bin, side * (walk - 0.5)))
    return placed


def _traffic(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    placed = [(z, sides[1][0] * 0.4) for z in _steps(rng.uniform(9, 30), 50, rng.uniform(9, 20))]
    placed += [(z, -sides[-1][0] * 0.35) for z in _steps(rng.uniform(7, 30), 50, rng.uniform(10, 20))]
    for side, (road, _, _) in sides.items():
        if road > 4.6 and rng.random() < 0.8:  # room to park
            first, last = rng.uniform(6, 12), rng.uniform(20, 45)
            placed += [(z, side * (road - 1.0)) for z in _steps(first, last, rng.uniform(5.2, 9))]
    return [(z, draw_car, x) for z, x in placed]


def _walkers(rng: np.random.Generator, sides: _Sides) -> list[_Placed]:
    placed = []
    for side, (road, walk, _) in sides.items():
        for _ in range(rng.integers(1, 4)):
            placed.append((rng.uniform(6.5, 18), side * rng.uniform(road + 0.6, walk - 0.3)))
    if rng.random() < 0.3:
        placed.append((rng.uniform(8, 16), rng.uniform(-sides[-1][0], sides[1][0])))
    return [(z, draw_person, x) for z, x in placed]


def _draw_bonnet(view: View, rng: np.random.Generator) -> None:
    centre = (view.width / 2 + rng.uniform(-20, 20), view.height)
    axes = (view.width * rng.uniform(0.4, 0.6), view.height * rng.uniform(0.05, 0.1))
    view.ellipse(centre, axes, (np.array([44, 46, 52]) * rng.uniform(0.7, 2.0)).tolist(), EGO)


def _steps(start: float, stop: float, step: float) -> list[float]:
    """From `start` up to but not including `stop`."""
    return np.arange(start, stop, step).tolist()
