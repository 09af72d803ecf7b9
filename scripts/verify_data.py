"""Check a whole dataset, once, after download and unpacking:

    python -m scripts.verify_data data=cityscapes data.root=DIR
    python -m scripts.verify_data data=folder data.root=DIR splits=[val]
    python -m scripts.verify_data data=imagenet data.root=DIR out=FILE.json

Compares the number of images with the official number, and decodes every file, for segmentation and classification.
Reports unreadable and damaged files, labels whose size differs from their image's, and ids that are not in the class
table. A JPEG has no checksums, and decoders fill damage inside it with other pixels, so only a damaged header or a
missing end is found: compare its archive's checksum. Goes on after a problem, but if images of a split lack labels, it
only names them. Prints each class's pixels and doubts (files that are left out, classes that no image shows, many
ignored pixels, 16-bit images that use few levels), then every kind of problem with its first files. Exit status 0 means
no problem. You can train on part of a dataset, but its number of images is reported.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from datasets import inspect, reading_errors
from datasets.verify import first_lines
from engine import assemble
from engine.configuration.command_line import configured
from engine.process.console import counted, make_console, table_of
from engine.process.output_files import writable_file, write_file
from engine.records.provenance import provenance
from engine.schema.additions import Plugins
from engine.schema.classification import ClassificationData
from engine.schema.data import Data
from engine.schema.keys import MOST_WORKERS, group, key


@dataclass
class VerifyData(Plugins):
    # Only timeout_seconds and the keys that choose images and classes matter.
    data: Data = group()
    splits: list[str] | None = None  # null: all
    out: str | None = key(None, written=True)  # JSON file with all problems and counts
    workers: int | None = key(None, least=0, most=MOST_WORKERS)  # processes; null: one per core


class SplitReport(NamedTuple):
    """What an inspection of a split has found."""

    images: int  # 0 if the split cannot be opened
    official_images: int | None  # None if no number is published
    problems: dict[str, list[str]]  # {kind: messages}
    doubts: list[str] = []  # about the labels
    classes: dict[str, dict[str, int]] | None = None  # {name: {"pixels": …, "labels": …}}; None without label pixels
    ignored_pixels: int | None = None

    @property
    def problem_count(self) -> int:
        return sum(map(len, self.problems.values()))

    def record(self) -> dict[str, Any]:
        """As in the JSON file: without classes and ignored pixels if there are no label pixels."""
        fields = self._asdict()
        return fields if self.classes is not None else {name: fields[name] for name in self._fields[:4]}


def verify_data(config: VerifyData) -> dict[str, SplitReport]:
    """Check the splits, print the findings, write `out`; returns the report of each split.

    ValueError: a key is wrong; problems of data are only reported.
    """
    console = make_console()
    if config.out is not None:
        writable_file("out", Path(config.out), kind="problems")
    official = assemble.official_images(config.data) or {"train": None}  # whose error shows the layout
    unknown = [split for split in config.splits or () if split not in official]
    if unknown or config.splits == []:
        raise ValueError(f"splits={config.splits}: expected some of {', '.join(official)}")
    splits = config.splits or list(official)
    with reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"):
        reports = {split: check_split(config.data, split, official[split], config.workers, console) for split in splits}
    show(reports, title=", ".join(filter(None, (config.data.name, config.data.root))), console=console)
    if config.out is not None:
        count = sum(report.problem_count for report in reports.values())
        split_records = {split: report.record() for split, report in reports.items()}
        record = {"dataset": config.data.name, "problems": count, "splits": split_records, "environment": provenance()}
        write_file(Path(config.out), json.dumps(record, indent=1) + "\n")
    return reports


def check_split(
    config: Data, split: str, official_images: int | None, workers: int | None, console: Console
) -> SplitReport:
    """Inspect a whole split. ValueError: there is no such folder."""
    try:
        dataset = assemble.split_of(config, split, draw=config.root is None)  # pictures in the cache folder alone
        if isinstance(config, ClassificationData) and len(dataset.classes) != assemble.official_classes(config):
            official_images = None  # other images in ImageNet's layout
        with counted(console, f"checking {dataset.name} {split}") as progress:
            inspection = inspect(dataset, workers, progress)
    except ValueError as error:
        if config.root is not None and not Path(config.root).is_dir():
            raise
        return SplitReport(0, official_images, {"split cannot be opened": [str(error)]})
    problems: dict[str, list[str]] = {}
    if official_images is not None and len(dataset) != official_images:
        message = f"expected {official_images}, found {len(dataset)}: an incomplete dataset, or an archive not unpacked"
        problems["number of images"] = [message]
    for problem in inspection.problems:
        problems.setdefault(problem.kind, []).append(problem.message)
    doubts = [*dataset.remarks, *inspection.doubts(f"image of {split}", keys="data.")]
    report = SplitReport(len(dataset), official_images, problems, doubts)
    pixels = inspection.by_class.tolist()
    if not any(pixels):
        return report
    counts = zip(dataset.classes, pixels, inspection.holding, strict=False)  # all ids have a count
    classes = {name: {"pixels": count, "labels": labels} for name, count, labels in counts}
    return report._replace(classes=classes, ignored_pixels=pixels[255])


def show(reports: Mapping[str, SplitReport], title: str, console: Console) -> None:
    """Print the classes, then the problems, then one line per split: the most important comes last."""
    show_classes(reports, console)
    show_problems(reports, console)
    summary = table_of(["split", "images", "official", "problems"], title=title)
    for split, report in reports.items():
        official = str(report.official_images or "–")
        style = "bold red" if report.problems else "green"
        summary.add_row(split, str(report.images), official, str(report.problem_count), style=style)
    console.print(summary)


def show_classes(reports: Mapping[str, SplitReport], console: Console) -> None:
    """Print the classes and the doubts of each split; a doubt that several splits share, once."""
    printed = set[str]()  # what is true of the whole folder is said once
    for split, report in reports.items():
        if report.classes is not None:
            console.print(histogram(split, report.classes, report.ignored_pixels or 0))
        for doubt in report.doubts:
            if doubt not in printed:
                console.print(f"{split}: {doubt}", soft_wrap=True)
        printed.update(report.doubts)
        if report.classes is not None or report.doubts:
            console.print()


def show_problems(reports: Mapping[str, SplitReport], console: Console) -> None:
    """Print the problems of each split, by kind. The expected layout is shown once, if no split could be opened."""
    layout_is_known = any(report.images for report in reports.values())  # or has been shown
    for split, report in reports.items():
        for kind, messages in report.problems.items():
            console.print(f"{split}: {kind}, {len(messages)}:", style="bold red")
            for message in first_lines(messages):
                # As `Layout.error` writes it: a problem, the expected layout and the fix.
                problem, layout, explanation = message.partition("\nExpected layout")
                fix = "".join(explanation.rpartition("\nFix: ")[1:]) if layout else ""
                text = problem + fix if layout_is_known else message
                layout_is_known |= bool(layout)
                console.print(indent(text, "  "), soft_wrap=True)
            console.print()


def histogram(split: str, classes: Mapping[str, dict[str, int]], ignored: int) -> Table:
    pixels, labels = ([counts[name] for counts in classes.values()] for name in ("pixels", "labels"))
    table = class_table(f"{split}: labelled pixels", [*classes], pixels, labels)
    table.add_section()
    table.add_row("ignored", f"{ignored:,}", f"{100 * ignored / (ignored + sum(pixels)):.2f} of all", "")
    return table


def class_table(title: str, classes: Sequence[str], pixels: Sequence[int], labels: Sequence[int]) -> Table:
    """Per class: pixels, share of all classes' pixels, and number of labels that contain it."""
    total = max(1, sum(pixels))
    rows = (
        [name, f"{count:,}", f"{100 * count / total:.2f}", str(containing)]
        for name, count, containing in zip(classes, pixels, labels, strict=True)
    )
    return table_of(["class", "pixels", "share %", "labels"], rows, title)


@configured("verify_data", VerifyData)
def main(config: VerifyData) -> None:
    sys.exit(any(report.problems for report in verify_data(config).values()))


if __name__ == "__main__":
    main()
