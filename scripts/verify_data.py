"""Check a whole dataset, once, after download and unpacking:

    python -m scripts.verify_data data=cityscapes data.root=DIR
    python -m scripts.verify_data data=folder data.root=DIR splits=[val]
    python -m scripts.verify_data data=imagenet data.root=DIR out=FILE.json

Compares the number of images with the official number, and decodes every file, for segmentation and classification.
Reports unreadable and damaged files, labels whose size differs from their image's, and ids that are not in the class
table. Does not stop at the first problem, but at a split in which images have no label, which it names. Prints the
pixels of every class and doubts (classes that no image shows, many ignored pixels), then every kind of problem with its
first files. Exit status 0 means no problem. You can train on part of a dataset, but its number of images is reported.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from datasets import ClassificationDataset, Inspection, SegmentationDataset, inspect, reading_errors
from datasets.verify import Problem, first_lines
from engine import assemble
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.process.console import counted, make_console, table_of
from engine.process.output_files import write_file
from engine.records.provenance import provenance
from engine.schema.classification import CLASSIFICATION_DATASETS, ClassificationData
from engine.schema.data import SEGMENTATION_DATASETS, Data, SegmentationData
from engine.schema.keys import MOST_WORKERS, group, key


@dataclass
class VerifyData:
    # Only timeout_seconds and the keys that choose images and classes matter.
    data: Data = group({**SEGMENTATION_DATASETS, **CLASSIFICATION_DATASETS})
    splits: list[str] | None = None  # null: all
    out: str | None = None  # JSON file with all problems and counts
    workers: int | None = key(None, least=0, most=MOST_WORKERS)  # processes; null: one per core


@dataclass(frozen=True)
class SplitReport:
    """The check of one split: `inspection` is None without label pixels, `classes` are empty if it cannot be opened."""

    split: str
    images: int
    official_images: int | None  # None: nothing is published
    classes: tuple[str, ...]
    problems: tuple[Problem, ...]
    inspection: Inspection | None
    doubts: tuple[str, ...] = ()  # about the labels

    def by_kind(self) -> dict[str, list[str]]:
        """{kind: messages}"""
        messages = defaultdict(list)
        for problem in self.problems:
            messages[problem.kind].append(problem.message)
        return dict(messages)

    def plain(self) -> dict:
        """For JSON."""
        report: dict[str, object] = {
            "images": self.images,
            "official_images": self.official_images,
            "problems": self.by_kind(),
        }
        if self.inspection is not None:
            counts = zip(self.inspection.pixels.tolist(), self.inspection.labels.tolist(), strict=True)
            columns = ({"pixels": pixels, "labels": labels} for pixels, labels in counts)
            report["classes"] = dict(zip(self.classes, columns, strict=True))
            report["ignored_pixels"] = self.inspection.ignored
        report["doubts"] = list(self.doubts)
        return report


def verify_data(values: DictConfig) -> list[SplitReport]:
    """Check the splits, print the findings, write `out`. Raises ValueError for wrong keys only, never for data."""
    config = configuration.typed(values, VerifyData)
    console = make_console()
    official = assemble.official_images(config.data) or {"train": None}  # whose error shows the layout
    unknown = [split for split in config.splits or () if split not in official]
    if unknown or config.splits == []:
        raise ValueError(f"splits={config.splits}: expected some of {', '.join(official)}")
    splits = config.splits or list(official)
    with reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"):
        reports = [check_split(config.data, split, official[split], config.workers, console) for split in splits]
    show(reports, title=", ".join(filter(None, (config.data.name, config.data.root))), console=console)
    if config.out is not None:
        write(Path(config.out), config.data, reports)
    return reports


def check_split(
    config: Data, split: str, official_images: int | None, workers: int | None, console: Console
) -> SplitReport:
    """Inspect a whole split. ValueError: there is no such folder."""
    dataset: SegmentationDataset | ClassificationDataset
    try:
        if isinstance(config, ClassificationData):
            dataset = assemble.classified_split(config, split)
            if len(dataset.classes) != assemble.official_classes(config):  # other images in ImageNet's layout
                official_images = None
        else:
            assert isinstance(config, SegmentationData), config
            dataset = assemble.dataset(config, split, draw=config.root is None)
        with counted(console, f"checking {dataset.name} {split}") as progress:
            found = inspect(dataset, workers, progress)
    except ValueError as error:
        if config.root is not None and not Path(config.root).is_dir():
            raise
        return SplitReport(split, 0, official_images, (), (Problem("split cannot be opened", str(error)),), None)
    problems = found.problems
    if official_images is not None and len(dataset) != official_images:
        message = f"expected {official_images}, found {len(dataset)}: an incomplete dataset, or an archive not unpacked"
        problems = (Problem("number of images", message), *problems)
    inspection = found if found.pixels.any() or found.ignored else None
    doubts = tuple(found.doubts(f"image of {split}"))
    return SplitReport(split, len(dataset), official_images, dataset.classes, problems, inspection, doubts)


def show(reports: Sequence[SplitReport], title: str, console: Console) -> None:
    """Print the classes, then the problems, then one line per split: the most important comes last."""
    for report in reports:
        if report.inspection is not None:
            console.print(histogram(report, report.inspection))
        for doubt in report.doubts:
            console.print(f"{report.split}: {doubt}", soft_wrap=True)
        if report.inspection is not None or report.doubts:
            console.print()
    layout_is_known = any(report.classes for report in reports)  # or has been shown
    for report in reports:
        for kind, messages in report.by_kind().items():
            console.print(f"{report.split}: {kind}, {len(messages)}:", style="bold red")
            for message in first_lines(messages):
                problem, found_layout, explanation = message.partition("\nExpected layout")
                fix = "".join(explanation.rpartition("\nFix: ")[1:]) if found_layout else ""
                text = problem + fix if layout_is_known else message
                layout_is_known |= bool(found_layout)
                console.print(indent(text, "  "), soft_wrap=True)
            console.print()
    summary = table_of(["split", "images", "official", "problems"], title=title)
    for report in reports:
        style = "bold red" if report.problems else "green"
        summary.add_row(
            *(report.split, str(report.images), str(report.official_images or "–"), str(len(report.problems))),
            style=style,
        )
    console.print(summary)


def histogram(report: SplitReport, found: Inspection) -> Table:
    share = 100 * found.ignored / (found.ignored + found.pixels.sum())
    table = class_table(f"{report.split}: labelled pixels", report.classes, found.pixels, found.labels)
    table.add_section()
    table.add_row("ignored", f"{found.ignored:,}", f"{share:.2f} of all", "")
    return table


def class_table(title: str, classes: Sequence[str], pixels: np.ndarray, labels: np.ndarray) -> Table:
    """Per class: pixels, share of all classes' pixels, and number of labels that contain it."""
    total = max(1, pixels.sum())
    rows = (
        [name, f"{count:,}", f"{100 * count / total:.2f}", str(containing)]
        for name, count, containing in zip(classes, pixels, labels, strict=True)
    )
    return table_of(["class", "pixels", "share %", "labels"], rows, title)


def write(path: Path, config: Data, reports: Sequence[SplitReport]) -> None:
    result = {
        "dataset": config.name,
        "problems": sum(len(report.problems) for report in reports),
        "splits": {report.split: report.plain() for report in reports},
        "environment": provenance(),
    }
    write_file(path, json.dumps(result, indent=1) + "\n")


@configured("verify_data", VerifyData)
def main(values: DictConfig) -> None:
    reports = verify_data(values)
    sys.exit(any(report.problems for report in reports))


if __name__ == "__main__":
    main()
