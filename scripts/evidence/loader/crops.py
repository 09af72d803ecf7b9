"""Our crops, the bare decoding of their files, and pipelines that resize whole images and then crop them.

For a key (epoch, index), all read the same files. Ours and the rivals return the same crop: image uint8 (3, h, w) and
label uint8 (h, w) of train ids.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torchvision import io
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from datasets import TrainingCrops
from datasets.streets import draw_street

# Standard deviation of the grain, by the size of its grains in pixels: mostly coarse, like a photograph's noise.
_GRAIN = {32: 8.0, 16: 6.0, 8: 4.5, 4: 3.5, 2: 3.0, 1: 0.6}
_FINE_GRAIN = {**_GRAIN, 2: 6.0, 1: 6.0}  # files of 500x375 pixels have about 100 KiB, as ImageNet's
_WOBBLE = 0.5  # of a drawn pixel: makes edges as uneven as real objects have
_CAMVID_LABELS, _VISTAS_LABELS = 12, 66


def scene(height: int, width: int, *, seed: int, grain: dict[int, float] = _GRAIN) -> tuple[np.ndarray, np.ndarray]:
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


def write_camvid(root: Path, images: int, size: Sequence[int]) -> None:
    """Write `images` pairs of PNGs of `size` (H, W)."""
    for index in range(images):
        image, label = scene(*size, seed=index)
        _write(root / "train" / f"{index:06d}.png", image[..., ::-1])
        _write(root / "trainannot" / f"{index:06d}.png", label % _CAMVID_LABELS)


def write_cityscapes(root: Path, images: int, size: Sequence[int]) -> None:
    """Write `images` pairs of PNGs of `size` (H, W)."""
    for index in range(images):
        image, label = scene(*size, seed=index)
        name = f"city_000000_{index:06d}"
        _write(root / "leftImg8bit/train/city" / f"{name}_leftImg8bit.png", image[..., ::-1])
        _write(root / "gtFine/train/city" / f"{name}_gtFine_labelIds.png", label)


def write_vistas(root: Path, images: int, size: Sequence[int], files: int | None = None) -> None:
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


def write_imagenet(root: Path, images: int, size: Sequence[int]) -> None:
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


OURS = "ours"
OPENCV = "OpenCV: resize, then crop"
V2 = "transforms.v2: resize, then crop"
V2_ANTIALIASED = "transforms.v2, antialias=True: resize, then crop"
DECODE_OPENCV, DECODE_TORCHVISION, DECODE_PILLOW = (f"bare decode, {by}" for by in ("OpenCV", "torchvision", "Pillow"))
DECODES, RIVALS = (DECODE_OPENCV, DECODE_TORCHVISION, DECODE_PILLOW), (OPENCV, V2, V2_ANTIALIASED)

Key = tuple[int, int]  # epoch, index
Crop = tuple[torch.Tensor, torch.Tensor]
ReadLabel = Callable[[Path], np.ndarray]
ReadAnything = Callable[[Path], object]


def pipelines(crops: TrainingCrops, palette: bool) -> dict[str, Callable[[Key], object]]:
    """All pipelines by name. `palette`: labels are palette PNGs; only Pillow returns their indices."""

    def decode(read_image: ReadAnything, read_label: ReadAnything, key: Key) -> tuple[object, object]:
        image, label = paths(crops, key)
        return read_image(image), read_label(label)

    label = pillow if palette else partial(opencv_pixels, flags=cv2.IMREAD_UNCHANGED)
    unchanged = partial(torchvision_pixels, mode=io.ImageReadMode.UNCHANGED)
    return {
        OURS: partial(ours, crops),
        DECODE_OPENCV: partial(decode, opencv_pixels, label),
        DECODE_TORCHVISION: partial(decode, torchvision_pixels, pillow if palette else unchanged),
        DECODE_PILLOW: partial(decode, pillow, pillow),
        OPENCV: partial(opencv, crops, label),
        V2: partial(transforms_v2, crops, label, False),
        V2_ANTIALIASED: partial(transforms_v2, crops, label, True),
    }


def paths(crops: TrainingCrops, key: Key) -> tuple[Path, Path]:
    files = crops.dataset.files[key[1]]
    assert files.image is not None and files.label is not None
    return files.image, files.label


def ours(crops: TrainingCrops, key: Key) -> Crop:
    item = crops[key]
    return item["image"], item["label"]


def opencv(crops: TrainingCrops, read_label: ReadLabel, key: Key) -> Crop:
    (image_path, label_path), transform = paths(crops, key), crops.transform
    (height, width), offset, mirrored = crops.geometry(key)
    image, label = opencv_pixels(image_path), read_label(label_path)
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    label = cv2.resize(label, (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
    rows, columns = (_Axis(*axis) for axis in zip((height, width), offset, transform.crop_size, strict=True))
    image = cv2.cvtColor(image[rows.covered, columns.covered], cv2.COLOR_BGR2RGB)
    label = crops.dataset.table.train_ids(label[rows.covered, columns.covered])
    borders = (rows.before, rows.after, columns.before, columns.after)
    if any(borders):
        image = cv2.copyMakeBorder(image, *borders, cv2.BORDER_CONSTANT, value=transform.fill)
        label = cv2.copyMakeBorder(label, *borders, cv2.BORDER_CONSTANT, value=transform.ignore_index)
    if mirrored:
        image, label = cv2.flip(image, 1), cv2.flip(label, 1)
    return torch.from_numpy(np.stack(cv2.split(image))), torch.from_numpy(label)


def transforms_v2(crops: TrainingCrops, read_label: ReadLabel, antialias: bool, key: Key) -> Crop:
    (image_path, label_path), transform = paths(crops, key), crops.transform
    size, offset, mirrored = crops.geometry(key)
    rows, columns = (_Axis(*axis) for axis in zip(size, offset, transform.crop_size, strict=True))
    image = torchvision_pixels(image_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written to
        label = torch.as_tensor(read_label(label_path))
    image = F.resize(image, size, InterpolationMode.BILINEAR, antialias=antialias)
    # Not as a Mask: torchvision resizes masks without the half-pixel offset, which shifts them against their image.
    label = F.resize(label[None], size, InterpolationMode.NEAREST_EXACT)[0]
    place = (rows.covered.start, columns.covered.start, rows.length, columns.length)
    image, label = F.crop(image, *place), F.crop(label, *place)
    label = torch.from_numpy(crops.dataset.table.train_ids(label.numpy()))[None]
    borders = [columns.before, rows.before, columns.after, rows.after]
    if any(borders):
        image, label = F.pad(image, borders, list(transform.fill)), F.pad(label, borders, transform.ignore_index)
    if mirrored:
        image, label = F.horizontal_flip(image), F.horizontal_flip(label)
    return image.contiguous(), label[0].contiguous()


class _Axis:
    """Along one axis: the part of the resized image that a crop covers, and the padding `before` and `after` it."""

    def __init__(self, size: int, start: int, crop: int):
        self.covered = slice(max(0, start), min(start + crop, size))
        self.length = self.covered.stop - self.covered.start
        self.before, self.after = max(0, -start), max(0, start + crop - size)


def opencv_pixels(path: Path, flags: int = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION) -> np.ndarray:
    pixels = cv2.imdecode(np.fromfile(path, np.uint8), flags)
    assert pixels is not None
    return pixels


def torchvision_pixels(path: Path, mode: io.ImageReadMode = io.ImageReadMode.RGB) -> torch.Tensor:
    return io.decode_image(io.read_file(str(path)), mode)


def pillow(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)
