"""CIFAR-10 and CIFAR-100: 32x32 images, kept in memory (Krizhevsky 2009).

torchvision reads the official files. Pictures in a zip file are decoded once into one array, which is cached.
"""

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from datasets.cache import cache_folder, read_arrays, write_arrays
from datasets.classification import ClassificationDataset
from datasets.file_list import FileList, is_hidden, listed
from datasets.layout import Layout, first_of
from datasets.reading import Stored, Unreadable, complete, decode_image
from datasets.segmentation import restorable

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""

_SUFFIXES = (".jpg", ".jpeg", ".png")
_VERSION = 1  # increment when decoded pixels change


def cifar10(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-10: split "train" (50,000 images) or "test" (10,000), 10 classes in the official order.

    `root` holds the unpacked python version, or a zip file of class folders, which may also be `root` itself. Its
    images are decoded once and cached until the file's size or time changes. ValueError if the split is unknown, `root`
    holds neither, or a file is missing or damaged.
    """
    return _cifar("CIFAR10", tuple(_CIFAR10.split()), root, split)


def cifar100(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-100: split "train" (50,000 images) or "test" (10,000), 100 fine classes. Otherwise as `cifar10`."""
    return _cifar("CIFAR100", tuple(_CIFAR100.split()), root, split)


def _cifar(name: str, classes: tuple[str, ...], root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """`name`: torchvision's."""
    from torchvision import datasets  # few runs need it

    reader = getattr(datasets, name)
    layout = Layout(
        name=name.lower(),
        splits=("train", "test"),
        tree=f"""
DIR/{reader.base_folder}/{", ".join(file for file, _ in reader.train_list + reader.test_list)}
or  DIR/*.zip    a zip file of train/CLASS/*.png, test/CLASS/*.png (or JPEG), 32x32 pixels; it may also be given as DIR
                 CLASS: {classes[0]} … {classes[-1]}
""",
        source=f"unpack {reader.filename} (docs/data.md)",
    )
    if root is not None and Path(root).suffix.lower() == ".zip" and not Path(root).expanduser().is_dir():
        archive = Path(root).expanduser()
        layout.check(archive.parent, split)
        return _in_zip(archive, split, classes, layout)
    root = layout.check(root, split)
    if (root / reader.base_folder).is_dir():
        files = [root / reader.base_folder / file for file, _ in (reader.train_list, reader.test_list)[split == "test"]]
        try:
            stored = reader(root, train=split == "train")
        except (RuntimeError, OSError):  # it compares the checksums of all files before it reads one
            raise layout.error(
                f"{layout.name}: a file in {root / reader.base_folder} is missing or damaged", root
            ) from None
        pixels = np.ascontiguousarray(stored.data.transpose(0, 3, 1, 2))
        names = np.array([f"{split}/{number:05d}" for number in range(len(pixels))])
        labels = np.array(stored.targets, np.int64)
        return ClassificationDataset(layout.name, split, classes, labels, listed(root, files), pixels, names)
    archives = sorted(path for path in root.iterdir() if path.suffix.lower() == ".zip" and path.is_file())
    if len(archives) > 1:
        found = ", ".join(path.name for path in archives)
        raise layout.error(f"{layout.name}: {root} holds several zip files: {found}; give one of them", root)
    if not archives:
        raise layout.error(f"{layout.name}: {root} does not hold the dataset", root)
    return _in_zip(archives[0], split, classes, layout)


@restorable()
def _in_zip(archive: Path, split: str, classes: tuple[str, ...], layout: Layout) -> ClassificationDataset:
    """The pictures that the zip file calls …/`split`/CLASS/NAME."""
    with _opened(archive) as content:
        members = sorted(name for name in content.namelist() if _is_picture(name, split))
    found = [PurePosixPath(name).parts[-2] for name in members]
    differences = {"no": [*filter(lambda name: name not in found, classes)], "unknown": sorted({*found} - {*classes})}
    if any(differences.values()):
        named = "; ".join(f"{problem} {first_of(names)}" for problem, names in differences.items() if names)
        raise layout.error(f"{layout.name}: wrong class folders in {archive}: {named}", archive.parent)
    labels = np.array([classes.index(name) for name in found], np.int64)
    order = np.argsort(labels, kind="stable")  # whatever lies above the class folders
    members = [members[number] for number in order]
    names = np.array(["/".join(PurePosixPath(name).parts[-2:]) for name in members])
    files = listed(archive.parent, [archive])
    pixels = _pixels(files, f"{layout.name} {split}", archive, members)
    return ClassificationDataset(layout.name, split, classes, labels[order], files, pixels, names)


def _pixels(files: FileList, name: str, archive: Path, members: Sequence[str]) -> np.ndarray:
    """All pictures, uint8 (n, 3, 32, 32) RGB, from the cache folder, or decoded and kept there."""
    file = cache_folder() / "decoded" / f"{files.fingerprint([_VERSION, name])}.npz"
    found = read_arrays(file, ["pixels"])
    if found is not None:
        return found[0]
    pixels = np.empty((len(members), 3, 32, 32), np.uint8)
    for number, picture in enumerate(_stored(archive, members)):
        planes = decode_image(picture).transpose(2, 0, 1)
        if planes.shape != (3, 32, 32):
            raise Unreadable(f"{picture.path}: has {planes.shape[2]}x{planes.shape[1]} pixels; expected 32x32.")
        pixels[number] = planes
    with suppress(OSError):  # a cache folder that is read-only or full only costs the time of decoding again
        write_arrays(file, {"pixels": pixels}, compressed=False)
    return pixels


def _is_picture(name: str, split: str) -> bool:
    *folders, file = PurePosixPath(name).parts
    named = len(folders) >= 2 and folders[-2] == split and file.lower().endswith(_SUFFIXES)
    return named and not any(map(is_hidden, (*folders, file)))


def _stored(archive: Path, members: Sequence[str]) -> Iterator[Stored]:
    with _opened(archive) as content:
        for member in members:
            try:
                data = content.read(member)
            except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
                raise Unreadable(
                    f"{archive / member}: cannot be unpacked ({error}); expected an intact zip file."
                ) from None
            yield complete(archive / member, data)


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, OSError) as error:
        raise Unreadable(f"{archive}: cannot be read as a zip file ({error}); expected an intact one.") from None
