"""The files of the paper's authors; the README of their release links them."""

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple


class ReleasedFile(NamedTuple):
    """One file."""

    network: str
    md5: str
    norm: str  # "std": plain scales; "inplace": |weight| + eps
    data: str  # "imagenet" or "vistas"
    scores: dict[str, tuple[float, ...]]  # by view, in percent: top-1 and top-5, or mIoU

    @property
    def scale(self) -> str:
        return "raw" if self.norm == "std" else "released"

    def __str__(self) -> str:
        kind = {"imagenet": "ImageNet top-1/top-5", "vistas": "Mapillary Vistas (test) mIoU"}[self.data]
        scores = [f"{view} {'/'.join(f'{score:.2f}' for score in pair)}" for view, pair in self.scores.items()]
        return f"the released {self.network}, norm {self.norm}: {kind} {', '.join(scores)}"


def _imagenet(network: str, md5: str, *top1_top5: float, norm: str = "inplace") -> ReleasedFile:
    """Scores of the centre crop of 224 pixels, of ten such crops, and of a centre crop of 320."""
    pairs = zip(top1_top5[::2], top1_top5[1::2], strict=True)
    return ReleasedFile(network, md5, norm, "imagenet", dict(zip(("224", "ten crops", "320"), pairs, strict=True)))


RELEASED_FILES = (
    _imagenet("ResNeXt-101", "448438885986d14db5e870b95f814f91", 77.04, 93.50, 78.72, 94.47, 77.92, 94.28, norm="std"),
    _imagenet("ResNeXt-101", "3b7a221cbc076410eb12c8dd361b7e4e", 78.08, 93.79, 79.52, 94.66, 79.38, 94.67),
    _imagenet(
        "ResNeXt-101 (synchronised)", "0a85a21847b15e5a242e17bf3b753849", 77.70, 93.78, 79.18, 94.60, 78.98, 94.56
    ),
    _imagenet("ResNeXt-152", "2c8d572587961ed74611d534c5b2e9ce", 78.28, 94.04, 79.73, 94.82, 79.56, 94.67),
    _imagenet("WideResNet-38", "1c085ab70b789cc1d6c1594f7a761007", 79.72, 94.78, 81.03, 95.43, 80.69, 95.27),
    _imagenet("DenseNet-264", "0b413d67b725619441d0646d663865bf", 78.57, 94.17, 79.72, 94.93, 79.49, 94.89),
    _imagenet("ResNet-50", "2522ca639f7fdfd7c0089ba1f5f6c2e8", 75.53, 92.59, 77.04, 93.57, 76.60, 93.49),
    _imagenet("ResNet-34", "61515c1484911c3cc753d405131e1dda", 73.27, 91.34, 75.19, 92.66, 74.87, 92.42),
    _imagenet("ResNet-101", "1552ae0f3d610108df702135f56bd27b", 77.07, 93.45, 78.58, 94.40, 78.25, 94.19),
    ReleasedFile(
        "WideResNet-38 (A2) + DeepLabV3",
        "913f78486a34aa1577a7cd295e8a33bb",
        "inplace",
        "vistas",
        {"flipped": (53.42,)},
    ),
)


def released_file(path: Path) -> ReleasedFile | None:
    """The released file with the md5 of `path`; None if there is none."""
    md5 = hashlib.md5()
    with open(path, "rb") as file:
        for chunk in iter(partial(file.read, 2**20), b""):
            md5.update(chunk)
    return next((file for file in RELEASED_FILES if file.md5 == md5.hexdigest()), None)
