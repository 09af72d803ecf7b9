"""Files to read: street scenes with grain like a photograph's, in the layouts of the datasets."""

import json
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from datasets.streets import draw_street

# Standard deviation of the grain, by the size of its grains in pixels: mostly coarse, like a photograph's noise.
_GRAIN = {32: 8.0, 16: 6.0, 8: 4.5, 4: 3.5, 2: 3.0, 1: 0.6}
_FINE_GRAIN = {**_GRAIN, 2: 6.0, 1: 6.0}  # files of 500x375 pixels have about 100 KiB, as ImageNet's
_WOBBLE = 0.5  # of a drawn pixel: makes edges as uneven as real objects have
_CAMVID_LABELS, _VISTAS_LABELS = 12, 66


def scene(height: int, width: int, seed: int, grain: dict[int, float] = _GRAIN) -> tuple[np.ndarray, np.ndarray]:
    """A drawn street, enlarged: image uint8 (H, W, 3) RGB and label uint8 (H, W) of Cityscapes label ids.

    `grain`: as `_GRAIN`.
    """
    rng = np.random.default_rng(seed)
    image, label = draw_street(rng)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    x, y = (
        (grid + 0.5) * (drawn / size) - 0.5 + _smooth(rng, height, width, 32, _WOBBLE)
        for grid, drawn, size in ((columns, image.shape[1], width), (rows, image.shape[0], height))
    )
    image = cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    label = cv2.remap(label, x, y, cv2.INTER_NEAREST, borderMode=cv2.BORDER_REPLICATE)
    noise = np.sum([_smooth(rng, height, width, size, deviation) for size, deviation in grain.items()], axis=0)
    return np.clip(image + noise[..., None], 0, 255).round().astype(np.uint8), label


def write_camvid(root: Path, images: int, size: tuple[int, int]) -> None:
    """Write `images` pairs of PNGs of `size` (H, W)."""
    for index in range(images):
        image, label = scene(*size, seed=index)
        _write(root / "train" / f"{index:06d}.png", image[..., ::-1])
        _write(root / "trainannot" / f"{index:06d}.png", label % _CAMVID_LABELS)


def write_cityscapes(root: Path, images: int, size: tuple[int, int]) -> None:
    """Write `images` pairs of PNGs of `size` (H, W)."""
    for index in range(images):
        image, label = scene(*size, seed=index)
        name = f"city_000000_{index:06d}"
        _write(root / "leftImg8bit/train/city" / f"{name}_leftImg8bit.png", image[..., ::-1])
        _write(root / "gtFine/train/city" / f"{name}_gtFine_labelIds.png", label)


def write_vistas(root: Path, images: int, size: tuple[int, int], files: int | None = None) -> None:
    """Write `images` pairs of a JPEG (quality 90, 4:2:0) and a palette PNG, `size` (H, W), copied to make `files`."""
    colours = [[index, 255 - index, 7] for index in range(_VISTAS_LABELS)]
    labels = [
        {"readable": f"class {index}", "color": colour, "evaluate": index < _VISTAS_LABELS - 1}
        for index, colour in enumerate(colours)
    ]
    for index in range(files or images):
        image_file, label_file = (
            root / f"training/{kind}/{index:022d}{suffix}" for kind, suffix in (("images", ".jpg"), ("labels", ".png"))
        )
        if index < images:
            image, label = scene(*size, seed=index)
            _write(image_file, image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])
            coloured = Image.fromarray(label)
            coloured.putpalette(sum(colours, []))
            label_file.parent.mkdir(parents=True, exist_ok=True)
            coloured.save(label_file)
        else:
            for file in (image_file, label_file):
                file.write_bytes(file.with_stem(f"{index % images:022d}").read_bytes())
    (root / "config.json").write_text(json.dumps({"labels": labels, "version": 1.1}))


def write_imagenet(root: Path, images: int, size: tuple[int, int]) -> None:
    """Write `images` JPEGs (quality 95, 4:2:0) of 0.8, 1 and 1.2 times `size` (H, W), half of them upright."""
    for index in range(images):
        height, width = (round((0.8 + 0.2 * (index % 3)) * length) for length in size[:: -1 if index % 2 else 1])
        image, _ = scene(height, width, seed=index, grain=_FINE_GRAIN)
        path = root / "train" / f"n{index % 2:08d}" / f"{index:06d}.JPEG"
        _write(path, image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])


def _smooth(rng: np.random.Generator, height: int, width: int, size: int, deviation: float) -> np.ndarray:
    """Noise float32 (H, W) that changes over `size` pixels."""
    small = rng.standard_normal((-(-height // size), -(-width // size)), np.float32) * np.float32(deviation)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def _write(path: Path, pixels: np.ndarray, options: list[int] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, pixels, options or [])[1].tobytes())
