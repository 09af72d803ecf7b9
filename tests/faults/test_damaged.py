"""Truncated checkpoints and images, full disks, and two runs in one folder."""

import itertools
import resource
from pathlib import Path

import numpy as np
import pytest

from datasets import synthetic
from engine.checkpoint import files as checkpoint
from tests import trees
from tests.faults.runs import ENTRIES, Run, before_call, finished, killed_after, says, survived, waiting_after


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_truncated_checkpoint_is_named_and_the_previous_one_used(tmp_path, whole_of, entry):
    run = killed_after(5, tmp_path / "run", entry=entry)
    previous = run.last.with_name("previous.pt")
    content = run.last.read_bytes()
    run.last.write_bytes(content[: len(content) // 2])
    step = checkpoint.load(previous)["step"]
    output = survived(run.run_dir, whole_of(entry), entry=entry)
    assert says(output, f"checkpoint {run.last} is ", f"The run continues from {previous}, of step {step}")


def images_of(entry: str, root: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Training images in files, and the options with which `entry` reads them."""
    if entry == "train_seg":
        synthetic(root, "val")
        return [file.image for file in synthetic(root, "train").files], (f"data.root={root}",)
    for split, name, number in itertools.product(("train", "val"), ("n01", "n02"), range(24)):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        trees.write(root / split / name / f"{number}.JPEG", pixels)
    options = ("data=imagenet", f"data.root={root}", "data.crop_size=32", "data.resize=36")
    return sorted((root / "train").rglob("*.JPEG")), options


@pytest.mark.slow
@pytest.mark.parametrize("entry, workers", [("train_seg", 2), ("train_imagenet", 0)])
def test_a_truncated_image_is_named(tmp_path, entry, workers):
    """All images lose half of their bytes after the third step."""
    images, options = images_of(entry, tmp_path / "images")
    options += (f"data.workers={workers}",)
    finished(tmp_path / "whole", *options, entry=entry)
    contents = {file: file.read_bytes() for file in images}
    run = Run(tmp_path / "run", *options, entry=entry, inject=waiting_after(3)).until_step(3)
    for file, content in contents.items():
        file.write_bytes(content[: len(content) // 2])
    (run.run_dir / "go").touch()
    output = run.fails()
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert any(str(file) in message for file in images)
    for file, content in contents.items():
        file.write_bytes(content)
    survived(run.run_dir, tmp_path / "whole", *options, entry=entry)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["train_seg", "train_imagenet"])
def test_the_second_of_two_runs_names_the_first(tmp_path, whole_of, entry):
    first = Run(tmp_path / "run", entry=entry, inject=waiting_after(2)).until_step(2)
    second = Run(tmp_path / "run", entry=entry)
    second.until(lambda: "waiting for it to end" in second.output)
    assert says(second.output, f"another process (process {first.process.pid} on ")
    first.killed()
    assert second.ends() == 0
    survived(tmp_path / "run", whole_of(entry), entry=entry)


def files_of_half_a_checkpoint(last: Path, *_) -> None:
    """A write of more fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (last.stat().st_size // 2, resource.RLIM_INFINITY))


def full_from_the_fourth_checkpoint() -> None:
    before_call(checkpoint, "save", 4, files_of_half_a_checkpoint)


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_room_for_a_checkpoint(tmp_path, whole_of, entry):
    run = Run(tmp_path / "run", entry=entry, inject=full_from_the_fourth_checkpoint)
    output = run.fails(f"error: checkpoint {run.last} of step 4 cannot be written: File too large")
    assert f"the last good checkpoint is kept: {run.last}, of step 3. Make room" in output
    survived(tmp_path / "run", whole_of(entry), entry=entry)
