"""Fill a folder with what `scripts.gpu_evidence` needs on a machine with torch, torchvision, triton and numpy alone:

    python -m scripts.evidence.gpu_pack out=DIR [camvid=DIR]
    python -m scripts.evidence.gpu_pack python=3.11 out=DIR
    python -m scripts.evidence.gpu_pack have=[torch,torchvision,triton,numpy,opencv-python-headless,matplotlib] out=DIR

DIR/*.whl are wheels of the versions installed here, compressed again: `pip install --no-index --no-deps --target SITE
DIR/*.whl` installs them. DIR/camvid has the training and validation images of CamVid at half their size, and
DIR/repository.tar.xz the committed code without the records of docs/results. All must be below 60 MiB.
"""

import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import cv2
from omegaconf import MISSING, DictConfig
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from datasets.camvid import camvid
from engine.configuration.command_line import configured
from engine.configuration.config import typed
from engine.output_files import write_file
from scripts.evidence.frame import MIB
from scripts.reports.papers import REPOSITORY

NEEDED = (
    *("hydra-core", "opencv-python-headless", "tensorboard", "matplotlib", "rich"),
    *("pytest", "pytest-xdist", "hypothesis"),
)
UNUSED = {"fonttools", "grpcio", "markdown", "tensorboard-data-server", "werkzeug"}  # for PDF files, and to show curves
FONTS = "matplotlib/mpl-data/fonts/ttf/"
UNUSED_FILES = ("tensorboard/webfiles.zip", "matplotlib/mpl-data/sample_data/", f"{FONTS}STIX", f"{FONTS}DejaVuSerif")
SOURCES = {"antlr4-python3-runtime"}  # published without a wheel; in Python alone
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_MIB = 60
JPEG_QUALITY = 75


@dataclass
class PackArguments:
    out: str = MISSING  # folder to fill
    camvid: str | None = None  # folder of CamVid; null: without its images
    python: str = "3.12"  # version on the other machine, Linux on x86-64
    have: list[str] = field(default_factory=lambda: ["torch", "torchvision", "triton", "numpy"])  # installed there


def required(names: Iterable[str]) -> set[str]:
    """Packages and all that they require, by what is installed here."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # such as triton, where torch is for CPUs
            continue
        if name not in found:
            found.add(name)
            wanted = [Requirement(text) for text in requires]
            waiting += [
                canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})
            ]
    return found


def fill(arguments: PackArguments) -> dict[str, float]:
    """Fill the folder; return MiB of its parts. ValueError: they exceed what travels."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(required(NEEDED) - required(arguments.have) - UNUSED)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            download(name, arguments.python, Path(folder))
        for wheel in sorted(Path(folder).glob("*.whl")):
            compress(wheel, out / wheel.name)
            print(f"{(out / wheel.name).stat().st_size / MIB:6.2f} MiB  {wheel.name}", flush=True)
    if arguments.camvid is not None:
        shrink(Path(arguments.camvid), out / "camvid")
    write_file(out / "repository.tar.xz", lzma.compress(archive()))
    sizes = {
        "wheels": size(out.glob("*.whl")),
        "CamVid": size((out / "camvid").rglob("*")),
        "repository": size(out.glob("*.xz")),
    }
    if sum(sizes.values()) > MOST_MIB:
        raise ValueError(f"out={out}: {sizes} MiB, more than {MOST_MIB}: name what is installed there in have=[…]")
    return sizes


def archive() -> bytes:
    """The committed files as a tar archive, without the records and pictures of docs/results."""
    left_out = [f":!docs/results/*.{suffix}" for suffix in ("pt", "json", "jsonl", "png")]
    command = ["git", "archive", "HEAD", "--", ".", *left_out]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout


def size(files: Iterable[Path]) -> float:
    return round(sum(file.stat().st_size for file in files if file.is_file()) / MIB, 1)


def download(name: str, python: str, folder: Path) -> None:
    """Download a package's wheel for another machine, or build it."""
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    wanted = [f"{name}=={metadata.version(name)}", "--no-deps"]
    if name in SOURCES:
        command = [*pip, "wheel", *wanted, "--wheel-dir", str(folder)]
    else:
        target = [f"--platform={platform}" for platform in PLATFORMS]
        target += [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:"]
        command = [*pip, "download", *wanted, *target, "--dest", str(folder)]
    subprocess.run(command, check=True)


def compress(wheel: Path, to: Path) -> None:
    """Write a wheel with LZMA, which pip can read and which takes a third less, and without `UNUSED_FILES`."""
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(to, "w", zipfile.ZIP_LZMA) as after:
        for entry in before.infolist():
            if not entry.filename.startswith(UNUSED_FILES):
                after.writestr(entry, before.read(entry), zipfile.ZIP_LZMA)


def shrink(root: Path, to: Path) -> None:
    """Write CamVid's training and validation images, and their labels, at half their size."""
    for split in ("train", "val"):
        for files in camvid(root, split).files:
            image, label = (cv2.imread(str(file), cv2.IMREAD_UNCHANGED) for file in (files.image, files.label))
            if image is None or label is None:
                raise ValueError(f"camvid={root}: cannot read {files.image} or {files.label}")
            half = (image.shape[1] // 2, image.shape[0] // 2)
            name = Path(str(files.image)).stem
            smaller = cv2.resize(image, half, interpolation=cv2.INTER_AREA)
            _, data = cv2.imencode(".jpg", smaller, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
            write_file(to / split / "images" / f"{name}.jpg", data.tobytes())
            smaller = cv2.resize(label, half, interpolation=cv2.INTER_NEAREST)
            _, data = cv2.imencode(".png", smaller)
            write_file(to / split / "labels" / f"{name}.png", data.tobytes())


@configured("gpu_pack", PackArguments)
def main(values: DictConfig) -> None:
    print(fill(typed(values, PackArguments)))


if __name__ == "__main__":
    main()
