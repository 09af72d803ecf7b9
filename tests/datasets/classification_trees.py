"""Fake ImageNet and CIFAR datasets in the exact official layouts, small enough to write for every test."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.cifar import _CIFAR10, _CIFAR100

WNIDS = ("n01440764", "n01443537", "n15075141")
CIFAR10, CIFAR100 = _CIFAR10.split(), _CIFAR100.split()


def photograph(seed: int, size: tuple[int, int]) -> np.ndarray:
    """A smooth picture with edges and little noise, uint8 (H, W, 3): JPEG changes it little."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
    pixels[size[0] // 3 :, size[1] // 2 :] //= 2
    return np.clip(pixels + rng.integers(-4, 5, pixels.shape), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def imagenet(root: Path) -> Path:
    """{split}/{wnid}/*.JPEG: 2 training images and 1 validation image per class, of different sizes."""
    for label, wnid in enumerate(WNIDS):
        for number in range(2):
            pixels = photograph(10 * label + number, (40 + 7 * number, 50 - 4 * label))
            write(root / "train" / wnid / f"{wnid}_{number}.JPEG", encoded(pixels, quality=95))
        pixels = photograph(100 + label, (44, 36 + label))
        write(root / "val" / wnid / f"ILSVRC2012_val_{label + 1:08d}.JPEG", encoded(pixels, quality=95))
    return root


def batch(seed: int, images: int, classes: int) -> tuple[np.ndarray, list[int]]:
    """Pixels, uint8 (n, 3072), and labels; the labels of five batches of two cover ten classes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (images, 3072), dtype=np.uint8)
    return pixels, [(images * seed + number) % classes for number in range(images)]


def as_python2(content: dict) -> bytes:
    """The pickle that Python 2 with an old numpy writes (protocol 2)."""
    return pickle.dumps(content, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar10_python(root: Path, images: int = 2) -> Path:
    for number in range(6):
        pixels, labels = batch(number, images, 10)
        names = [f"picture_s_{number}{index:05d}.png" for index in range(images)]
        content = {"batch_label": "a batch", "labels": labels, "data": pixels, "filenames": names}
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        write(root / "cifar-10-batches-py" / name, as_python2(content))
    write(root / "cifar-10-batches-py" / "batches.meta", as_python2({"label_names": CIFAR10, "num_vis": 3072}))
    return root


def cifar10_binary(root: Path, images: int = 2) -> Path:
    for number in range(6):
        pixels, labels = batch(number, images, 10)
        name = f"data_batch_{number + 1}.bin" if number < 5 else "test_batch.bin"
        records = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        write(root / "cifar-10-batches-bin" / name, records.tobytes())
    return root


def cifar100(root: Path, images: int = 6) -> Path:
    """Both official forms. The coarse label of fine label 30 + i is i."""
    for seed, split in enumerate(("train", "test")):
        pixels, coarse = batch(seed, images, 20)
        fine = [30 + label for label in coarse]
        content = {"coarse_labels": coarse, "fine_labels": fine, "data": pixels, "filenames": ["x.png"] * images}
        write(root / "cifar-100-python" / split, as_python2(content))
        records = np.concatenate([np.array([coarse, fine], np.uint8).T, pixels], axis=1)
        write(root / "cifar-100-binary" / f"{split}.bin", records.tobytes())
    return root


def pictures(classes: list[str], kind: str) -> dict[str, bytes]:
    """{split/class/file: bytes}: 2 training pictures and 1 test picture per class."""
    suffix = {"PNG": "png", "JPEG": "jpg"}[kind]
    return {
        f"{split}/{name}/{number:04d}.{suffix}": encoded(photograph(7 * label + number, (32, 32)), kind)
        for split, count in (("train", 2), ("test", 1))
        for label, name in enumerate(classes)
        for number in range(count)
    }


def cifar_folders(root: Path, classes: list[str] = CIFAR10, kind: str = "PNG") -> Path:
    for name, data in pictures(classes, kind).items():
        write(root / name, data)
    return root


def cifar_zip(path: Path, classes: list[str] = CIFAR10, kind: str = "PNG", above: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in reversed(pictures(classes, kind).items()):  # in no helpful order
            archive.writestr(above + name, data)
    return path
