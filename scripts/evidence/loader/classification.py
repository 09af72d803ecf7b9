"""Speed of classification's training images: crops of JPEG files one by one, and of CIFAR in memory by the minibatch.

For a key, ours and the rivals make the same crop of ImageNet-like files. On CIFAR they draw their own.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import io, transforms
from torchvision.transforms import functional as pillow_functional
from torchvision.transforms import v2

from datasets import ClassificationCrops, ClassificationDataset, PaddedCrop, RandomResizedCrop, collated
from datasets.file_list import listed
from scripts.evidence import frame
from scripts.evidence.loader.crops import OURS, Key, opencv_pixels, torchvision_pixels
from scripts.evidence.measuring import timed_over
from scripts.reports.markdown import Columns, columns, section

PILLOW, V2 = "torchvision on Pillow images", "transforms.v2 on tensors"
DECODE_OPENCV, DECODE_TORCHVISION = "bare decode, OpenCV", "bare decode, torchvision"
PHOTOGRAPHS, CIFAR = "ImageNet-like JPEG", "CIFAR in memory"

_REQUIRED = {"photograph_size": [375, 500], "photograph_crop_size": 224, "minibatch": 128}


def measure(photographs: ClassificationDataset, crop_size: int, minibatch: int, rounds: int) -> dict:
    """Times in ms of all pipelines, by source, and the mean size of a photograph's file."""
    crops = ClassificationCrops(photographs, RandomResizedCrop(crop_size, colours=()), seed=0)
    keys = [(epoch, epoch % len(photographs)) for epoch in range(rounds)]
    return {
        "times_ms": {
            PHOTOGRAPHS: timed_over(of_photographs(crops), keys),
            CIFAR: timed_over(of_cifar(drawn_cifar(), minibatch), range(rounds)),
        },
        "bytes_per_file": int(photographs.files.sizes.mean()),
    }


def of_photographs(crops: ClassificationCrops) -> dict[str, Callable[[Key], object]]:
    """Ours and the rivals make a crop, uint8 (3, h, w), from a key; the others decode its file."""
    return {
        OURS: lambda key: crops[key]["image"],
        PILLOW: partial(_pillow, crops),
        V2: partial(_v2, crops),
        DECODE_OPENCV: lambda key: opencv_pixels(crops.dataset.path(key[1])),
        DECODE_TORCHVISION: lambda key: torchvision_pixels(crops.dataset.path(key[1])),
    }


def _drawn(crops: ClassificationCrops, key: Key, size: tuple[int, int]) -> tuple[list[int], bool]:
    """Top, left, height and width of our crop of an image of `size` (H, W), and whether it is mirrored."""
    assert isinstance(crops.transform, RandomResizedCrop)
    rng = np.random.default_rng([crops.seed, *key])
    part = crops.transform.draw(size, rng)
    return list(part), bool(rng.random() < crops.transform.flip)


def _pillow(crops: ClassificationCrops, key: Key) -> torch.Tensor:
    with Image.open(crops.dataset.path(key[1])) as file:
        image = file.convert("RGB")
    part, mirrored = _drawn(crops, key, image.size[::-1])
    image = pillow_functional.resized_crop(image, *part, size=[crops.transform.size] * 2)
    return pillow_functional.pil_to_tensor(pillow_functional.hflip(image) if mirrored else image)


def _v2(crops: ClassificationCrops, key: Key) -> torch.Tensor:
    image = io.decode_jpeg(io.read_file(str(crops.dataset.path(key[1]))), io.ImageReadMode.RGB)
    part, mirrored = _drawn(crops, key, (image.shape[1], image.shape[2]))
    image = v2.functional.resized_crop(image, *part, size=[crops.transform.size] * 2, antialias=True)
    return (v2.functional.horizontal_flip(image) if mirrored else image).contiguous()


def drawn_cifar(images: int = 10_000) -> ClassificationDataset:
    """Noise in the shape of CIFAR-10: the time does not depend on the pixels' values."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, 3, 32, 32), dtype=np.uint8)
    names = np.array([f"{number:05d}" for number in range(images)])
    classes = tuple(map(str, range(10)))
    return ClassificationDataset(
        "noise", "train", classes, np.arange(images) % 10, listed(Path(), []), pixels=pixels, names=names
    )


def of_cifar(dataset: ClassificationDataset, minibatch: int) -> dict[str, Callable[[int], dict]]:
    """Each makes minibatch number n: {"image": uint8 (minibatch, 3, 32, 32), "label": int64 (minibatch,), …}."""
    assert dataset.pixels is not None
    crops = ClassificationCrops(dataset, PaddedCrop(), seed=0)
    images = dataset.pixels.transpose(0, 2, 3, 1).copy()  # (n, H, W, 3), as torchvision keeps them
    tensors = torch.from_numpy(dataset.pixels)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    one_by_one = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    on_pillow = transforms.Compose([transforms.ToPILImage(), *one_by_one, transforms.PILToTensor()])
    on_tensors = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])

    def numbers(number: int) -> list[int]:
        return [order[(number * minibatch + place) % len(order)] for place in range(minibatch)]

    def ours(number: int) -> dict:
        return collated(crops.__getitems__([(0, image) for image in numbers(number)]))

    def rival(source: np.ndarray | torch.Tensor, transform: Callable, number: int) -> dict:
        chosen = numbers(number)
        return default_collate([{"image": transform(source[i]), "label": dataset.label(i)} for i in chosen])

    return {OURS: ours, PILLOW: partial(rival, images, on_pillow), V2: partial(rival, tensors, on_tensors)}


def sections(result: dict) -> Iterator[str]:
    """A table for each source."""
    measured, arguments = result["classification"], result["arguments"]
    height, width = arguments["photograph_size"]
    about = {
        PHOTOGRAPHS: f"{width}x{height} pixels, files of {measured['bytes_per_file'] / 1024:.0f} KiB",
        CIFAR: f"minibatches of {arguments['minibatch']}",
    }
    rows = [
        {"source": source, "pipeline": name, "times_ms": times_ms, "images": images}
        for source, images in ((PHOTOGRAPHS, 1), (CIFAR, arguments["minibatch"]))
        for name, times_ms in measured["times_ms"][source].items()
    ]
    for source, found in frame.grouped(rows, ["source"], "pipeline").items():
        yield section(f"{source}: {about[source]}", columns(found.values(), COLUMNS))


COLUMNS: Columns = [
    ("pipeline", "{pipeline}"),
    ("ms", lambda row: f"{statistics.median(row['times_ms']):.2f}"),
    ("images/s per core", lambda row: f"{1e3 * row['images'] / statistics.median(row['times_ms']):,.0f}"),
    ("time to ours", lambda row: frame.relative_time(row, OURS)),
]
