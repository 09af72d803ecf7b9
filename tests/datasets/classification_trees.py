"""Fake ImageNet and CIFAR datasets in the exact official layouts, small enough to write for every test."""

import pickle
import zipfile
from hashlib import md5
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10 as CIFAR10_FILES
from torchvision.datasets import CIFAR100 as CIFAR100_FILES

WNIDS = ("n01440764", "n01443537", "n15075141")
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
CIFAR100 = [f"class_{number:02}" for number in range(100)]


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


def cifar10_python(root: Path, monkeypatch) -> Path:
    """The official files; torchvision is told their checksums."""
    files = []
    for number in range(6):
        pixels, labels = batch(number, 2, 10)
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        files.append(_pickled(root / CIFAR10_FILES.base_folder / name, {"labels": labels, "data": pixels}))
    meta = _pickled(root / CIFAR10_FILES.base_folder / "batches.meta", {"label_names": CIFAR10})
    return _records(CIFAR10_FILES, files[:5], files[5:], meta, root, monkeypatch)


def cifar100_python(root: Path, monkeypatch) -> Path:
    """The coarse label of fine label 30 + i is i."""
    files = []
    for seed, split in enumerate(("train", "test")):
        pixels, coarse = batch(seed, 6, 20)
        content = {"coarse_labels": coarse, "fine_labels": [30 + label for label in coarse], "data": pixels}
        files.append(_pickled(root / CIFAR100_FILES.base_folder / split, content))
    meta = _pickled(root / CIFAR100_FILES.base_folder / "meta", {"fine_label_names": CIFAR100})
    return _records(CIFAR100_FILES, files[:1], files[1:], meta, root, monkeypatch)


def _pickled(path: Path, content: dict) -> list[str]:
    """Write a pickle as Python 2 with an old numpy does. Returns its name and checksum."""
    data = pickle.dumps(content, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    return [write(path, data).name, md5(data).hexdigest()]


def _records(files: type, train: list, test: list, meta: list, root: Path, monkeypatch) -> Path:
    monkeypatch.setattr(files, "train_list", train)
    monkeypatch.setattr(files, "test_list", test)
    monkeypatch.setattr(files, "meta", files.meta | {"md5": meta[1]})
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


def cifar_zip(
    path: Path, classes: list[str] = CIFAR10, kind: str = "PNG", above: str = "", splits=("train", "test")
) -> Path:
    """20 training and 10 test images of CIFAR-10."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in reversed(pictures(classes, kind).items()):  # in no helpful order
            if name.startswith(splits):
                archive.writestr(above + name, data)
    return path
