"""Predict images; only a checkpoint is needed:

    python -m scripts.predict checkpoint=RUN_DIR input=IMAGE_OR_DIR output=DIR
    python -m scripts.predict checkpoint=FILE.pt input=DIR output=DIR window.size=1024
    python -m scripts.predict checkpoint=CLASSIFIER.pt input="Straße 1" output=DIR top_k=3 report=FILE.html

Reads the usual photograph formats and rotates by EXIF orientation. Segmentation writes three PNGs
per image, at its size: ids/NAME.png (the labels' own ids; classes.json lists them), colour/NAME.png and
overlays/NAME.png, and with probabilities=true probabilities/NAME.npy. Classification writes predictions.csv, the
likeliest classes of each image. report=FILE.html also writes a page: every image, its overlay, and each
class's share. window.size=PIXELS limits the memory for large images, as in eval.py.
"""

import csv
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from datasets.file_list import files_in, why_unfit
from datasets.folder import image_suffixes
from datasets.label_names import LabelNames
from datasets.layout import first_of, read_json
from datasets.levels import Use, doubts_of_levels, use_of
from datasets.reading import Range16, as_levels, decode_values
from datasets.segmentation import picture
from datasets.stored import ARRAY_SUFFIX, COLOURS, read
from datasets.verify import notes_as_remarks
from engine import assemble
from engine.assemble.contracts import parts_named
from engine.checkpoint.files import file_of
from engine.configuration.command_line import configured
from engine.prediction.opening import open_checkpoint
from engine.prediction.predictors import Classifier, Segmenter
from engine.process.console import log_to, logger, make_console, progress_bar, speed_of, tracked
from engine.process.output_files import (
    WrittenBehind,
    check_outside,
    is_ours,
    npy,
    png,
    short_name,
    writable_file,
    writable_folder,
    write_file,
)
from engine.schema.data import Data, FolderData
from engine.schema.evaluation import Prediction
from engine.segmentation.pictures import overlay
from scripts.reports.predictions import Page

KINDS = ("ids", "colour", "overlays", "probabilities")
CLASSES = "classes.json"
TABLE = "predictions.csv"
SUFFIXES = {"probabilities": "npy"}  # of the others png
_USUAL = LabelNames()


def label_names(data: Data) -> LabelNames:
    """How the labels of the training's dataset are called, which a folder may hold beside its images."""
    if not isinstance(data, FolderData):
        return LabelNames()
    return LabelNames(data.label_folder, data.label_suffix, image_folder=data.image_folder)


def predict(options: Prediction) -> list[Path]:
    """Predict as configured (`engine.schema.evaluation.Prediction`).

    Returns each image's file of ids; for a classifier the table.

    Raises:
        ValueError: the checkpoint or the input cannot be used; or some images are unreadable, which are named after
            the others have been predicted.
    """
    console = make_console()
    log_to(console, None)
    source = Path(options.input)
    output = Path(options.output)
    network, config, state = open_checkpoint(options.checkpoint, options)
    assemble.arithmetic(config.trainer)
    names = label_names(config.data)
    above = (output.resolve(), *output.resolve().parents)
    check_outside("output", output, filter(partial(is_labelled, names=names), above))
    images = find_images(source, output, network.channels, names)
    check_written(options, output, images.values(), class_list(network) if isinstance(network, Segmenter) else None)
    title = f"{len(network.classes)} classes, {config.data.name}, step {state['step']}"
    page = Page(title, network.classes, getattr(network, "palette", None), options.top_k)
    findings = Findings()
    results = Results(network, options, page)
    if isinstance(network, Segmenter):
        write_classes(output / CLASSES, network)
    layers = 2 + 2 * len(network.classes) * options.probabilities  # probabilities in float32 and float16
    since_s = 0.0
    with parts_named(config), progress_bar(console) as progress, WrittenBehind() as files:
        for name, file in tracked(progress, images.items(), "predicting"):
            shown_path = str(file.relative_to(source if source.is_dir() else source.parent))
            try:
                pixels = findings.decode(file, shown_path, network)
                if findings.images < 3:  # the first may take longer than others
                    since_s = time.perf_counter()
                image = InputImage(name, shown_path, pixels, picture(pixels, network.shown))
                wait = start(network, image, options.probabilities)
            except (ValueError, MemoryError) as error:
                findings.put_aside(file, error)
                continue
            make = partial(findings.unless_memory_runs_out, file, wait)
            files.add(make, partial(results.write, image), layers * pixels.nbytes)
    if findings.images > 1:
        logger.info(speed_of(findings.images - 1, since_s))
    written = results.finish(images)
    for doubt in findings.doubts(source, network.range16):
        logger.warning(doubt)
    bad = findings.unreadable
    console.print(f"predicted {len(images) - len(bad)} of {len(images)} images: {output}", soft_wrap=True)
    if bad:
        raise ValueError("\n".join([f"{len(bad)} of {len(images)} images were not predicted:", *bad]))
    return written


class InputImage(NamedTuple):
    """A decoded image."""

    name: str  # of its results, see `find_images`
    shown_path: str  # in tables and on the page
    pixels: np.ndarray  # (H, W, C)
    picture: np.ndarray  # what a page or an overlay shows, uint8 (H, W, 3) RGB


@dataclass
class Findings:
    """What is said of the images in the end."""

    images: int = 0  # that were decoded
    unreadable: list[str] = field(default_factory=list)  # why images were put aside
    pages: dict[str, int] = field(default_factory=dict)  # of files of which only the first was read
    levels: list[Use] = field(default_factory=list)  # of 16-bit images, and some of 8 bits

    def decode(self, file: Path, shown_path: str, network: Segmenter | Classifier) -> np.ndarray:
        """Decode an image. ValueError: it cannot be read, or its header says that it is too large."""
        stored = read(file, True)
        if stored.is_png_or_jpeg:
            stored.size()
        values = decode_values(stored, channels=network.channels)
        if values.dtype == np.uint16:
            self.levels.append(use_of(values, network.range16))
        self.images += 1
        pages = stored.pages_if_one_is_read(network.channels)
        if pages > 1:
            self.pages[shown_path] = pages
        return as_levels(values, network.range16)

    def doubts(self, source: Path, range16: Range16) -> list[str]:
        """What may be wrong with the images of `source`."""
        pages = notes_as_remarks({"pages": self.pages}) if self.pages else ()
        return [*pages, *doubts_of_levels(self.levels, range16, f"images in {source}", keys=None)]

    def unless_memory_runs_out(self, file: Path, make: Callable[[], "Outcome"]) -> "Outcome | None":
        """What `make` returns for an image. None, which is noted: there was not enough memory."""
        try:
            return make()
        except MemoryError as error:
            self.put_aside(file, error)
            return None

    def put_aside(self, file: Path, error: Exception) -> None:
        text = str(error) if file.name in str(error) else f"{file}: {error}: cut it into tiles, or use smaller windows"
        self.unreadable.append(text)


class Outcome(NamedTuple):
    """What was predicted of an image."""

    shares: np.ndarray  # of each class among the pixels; of a classifier, its probability
    ids: np.ndarray | None = None  # train ids, uint8 (H, W)
    contents: Mapping[str, bytes] = MappingProxyType({})  # of its files, by kind


def start(network: Segmenter | Classifier, image: InputImage, probabilities: bool) -> Callable[[], Outcome]:
    """Start to predict an image; the function that is returned waits for the prediction, and encodes its files."""
    if isinstance(network, Segmenter):
        return partial(segmented, network, image, network.start_prediction(image.pixels, probabilities))
    wait = network.start_prediction(image.pixels)
    return lambda: Outcome(wait())


def segmented(network: Segmenter, image: InputImage, wait: Callable[[], np.ndarray]) -> Outcome:
    """Wait for an image's prediction and encode its files."""
    prediction = wait()  # ids (H, W), or probabilities (classes, H, W)
    ids = prediction if prediction.ndim == 2 else network.classes_by(prediction)
    colours = network.palette[ids]
    contents = {
        "ids": png(network.label_ids[ids]),
        "colour": png(colours),
        "overlays": png(overlay(image.picture, colours)),
    }
    if prediction.ndim == 3:
        contents["probabilities"] = npy(prediction.astype(np.float16))
    shares = np.bincount(ids.reshape(-1), minlength=len(network.classes)) / ids.size
    return Outcome(shares, ids, contents)


class Results:
    """Writes what is predicted: pictures or a table, and a page if a report is asked for."""

    def __init__(self, network: Segmenter | Classifier, options: Prediction, page: Page):
        self.network = network
        self.options = options
        self.output = Path(options.output)
        self.page = page
        self.rows: list[list[str]] = []  # of the table

    def write(self, image: InputImage, outcome: Outcome | None) -> None:
        """Write an image's files, or add its row to the table, and add it to the page; nothing if it was put aside."""
        if outcome is None:
            return
        for kind, content in outcome.contents.items():
            write_file(self.output / kind / f"{image.name}.{SUFFIXES.get(kind, 'png')}", content)
        if isinstance(self.network, Classifier):
            classes = likeliest(outcome.shares, self.network.classes, self.options.top_k)
            self.rows.append([image.shown_path, *classes])
        if self.options.report:
            self.page.add(image.shown_path, image.picture, outcome.shares, outcome.ids)

    def finish(self, names: Iterable[str]) -> list[Path]:
        """Write the table and the page. Returns the file of ids of each name, or the table."""
        files = [self.output / "ids" / f"{name}.png" for name in names]
        if isinstance(self.network, Classifier):
            files = [self.output / TABLE]
            write_table(files[0], self.rows)
        if self.options.report:
            write_file(Path(self.options.report), "".join(self.page.html()))
        return files


def likeliest(probabilities: np.ndarray, classes: Sequence[str], count: int) -> list[str]:
    """[class, probability, …] of the `count` likeliest classes, most likely first."""
    ranked = np.argsort(-probabilities, kind="stable")[:count]
    return [text for number in ranked for text in (classes[number], f"{probabilities[number]:.6f}")]


def write_table(path: Path, rows: list[list[str]]) -> None:
    """Write image,class1,probability1,class2,… as CSV; names that are not UTF-8 keep their bytes."""
    text = StringIO()
    ranks = range(1, 1 + max(len(row) for row in rows) // 2) if rows else ()
    titles = [title for rank in ranks for title in (f"class{rank}", f"probability{rank}")]
    csv.writer(text, lineterminator="\n").writerows([["image", *titles], *rows])
    write_file(path, text.getvalue().encode(errors="surrogateescape"))


def is_labelled(folder: Path, names: LabelNames) -> bool:
    """Whether a folder holds images of a dataset: it is called images, or as in `names`, with labels beside it."""
    label_folders = (folder.parent / name for name in ("labels", "masks", names.folder))
    return folder.name in ("images", names.image_folder) and any(map(Path.is_dir, label_folders))


def find_images(source: Path, output: Path, channels: int = COLOURS, labels: LabelNames = _USUAL) -> dict[str, Path]:
    """Find one image, or all in a folder and its subfolders, also linked ones: {result name: image file}, sorted.

    A name is the path in the folder without the suffix; images that differ only in the suffix keep theirs. Files
    without an image suffix, pipes, devices, huge files, and `labels` beside their images are skipped, which is logged.
    Hidden files and earlier predictions in `output` are left out. `channels`: of each image. ValueError: there is none.
    """
    if source.is_file():
        return {short_name(source.stem): source}
    if not source.is_dir():
        problem = "does not exist: expected an image file, or a folder of such files"
        raise ValueError(f"input={source} {why_unfit(source) or problem}")
    images, skipped_files = images_in(source, output, channels, labels)
    for why, paths in skipped_files.items():
        names = [str(path.relative_to(source)) for path in sorted(paths)]
        if names:
            logger.info(f"skipped {len(names)} file(s) {why}: {first_of(names)}")
    if not images:
        raise ValueError(f"input={source} holds no image, such as .png, .jpg or .tif, or only predictions")
    return dict(zip(result_names([path.relative_to(source) for path in images]), images, strict=True))


def images_in(folder: Path, output: Path, channels: int, labels: LabelNames) -> tuple[list[Path], dict[str, Set[Path]]]:
    """The images in a folder, sorted, and by reason the files that are skipped, see `find_images`."""
    ours = {(output / kind).resolve() for kind in (*KINDS, CLASSES, TABLE)}
    real = ((Path(file.path), Path(os.path.realpath(file))) for _, file in files_in(folder))
    files = sorted(path for path, real_path in real if ours.isdisjoint([real_path, *real_path.parents]))
    image_files = [path for path in files if path.suffix.lower() in image_suffixes(channels)]
    stems = {path.with_suffix("") for path in image_files}  # a .npy file beside an image of three channels is none
    image_files += [path for path in files if path.suffix.lower() == ARRAY_SUFFIX and path.with_suffix("") not in stems]
    regular_files = sorted(path for path in image_files if why_unfit(path) is None)
    label_files = {folder / path for path in labels.labels_among([path.relative_to(folder) for path in regular_files])}
    skipped_files: dict[str, Set[Path]] = {
        "without an image's suffix": {*files} - {*image_files},
        "that are no regular files of at most 4 GiB": {*image_files} - {*regular_files},
        "that are labels of images": label_files,
    }
    return [path for path in regular_files if path not in label_files], skipped_files


def result_names(images: Sequence[Path]) -> list[str]:
    """The paths without suffixes; with suffixes where two would be equal, also on disks that ignore case.

    Names that would be too long for a file are cut, see `short_name`.
    """
    names = [short_name(path.with_suffix("").as_posix()) for path in images]
    while True:  # a suffix may make a name equal to another one
        counts = Counter(name.casefold() for name in names)
        full = [
            short_name(path.as_posix()) if counts[name.casefold()] > 1 else name
            for name, path in zip(names, images, strict=True)
        ]
        if full == names:
            return names
        names = full


def check_written(options: Prediction, output: Path, images: Iterable[Path], class_rows: list[dict] | None) -> None:
    """ValueError if files would be replaced that this command has not written, or has with other classes.

    A classes.json of ours stands for the pictures beside it. `class_rows`: see `class_list`; None for a classifier.
    """
    if options.report:
        writable_file("report", Path(options.report), file_of(options.checkpoint), *images, kind="page of predictions")
    if class_rows is None:
        writable_file("output", output / TABLE, kind="likeliest classes")
        return
    file = writable_folder("output", output) / CLASSES
    if is_ours(file, "class list"):
        classes = read_json(file)
        if classes != class_rows:
            old_names, names = (", ".join(str(row["name"]) for row in rows) for rows in (classes, class_rows))
            raise ValueError(
                f"output={output} holds another network's predictions, of the classes {old_names}; this network has "
                f"{names}: give another folder"
            )
        return
    if os.path.lexists(file) and not (file.is_file() and not file.stat().st_size):
        raise ValueError(f"output={output} has a dataset's {CLASSES}, which would be lost: give another folder")
    files = (path for kind in KINDS for path in (output / kind).rglob("*") if not path.is_dir())
    foreign = next((path for path in files if path.suffix.lower() in (".png", ".npy")), None)
    if foreign is not None:
        raise ValueError(
            f"output={output} holds {foreign.relative_to(output)}, which might be replaced: no {CLASSES} says that "
            f"this command wrote it. Give another folder"
        )


def write_classes(path: Path, network: Segmenter) -> None:
    lines = (json.dumps(row, ensure_ascii=False) for row in class_list(network))
    write_file(path, "[\n" + ",\n".join(lines) + "\n]\n")


def class_list(network: Segmenter) -> list[dict]:
    """What ids and colours mean: [{"id": 7, "name": "road", "colour": [128, 64, 128]}, …]."""
    meant = zip(network.label_ids.tolist(), network.classes, network.palette.tolist(), strict=True)
    return [{"id": number, "name": name, "colour": colour} for number, name, colour in meant]


main = configured("predict", Prediction)(predict)

if __name__ == "__main__":
    main()
