"""Images damaged while a run reads them, reads that hang, and data workers that hang or die."""

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import pytest

from datasets import TrainingCrops, synthetic
from tests import trees
from tests.faults import runs
from tests.faults.runs import SLOWLY, Run, before_call, case, children, survived
from tests.mounts import mount_dead, mount_small_shared_memory, needs_mounts


class Images:
    """Images in files, for runs of `entry`."""

    def __init__(self, entry: str, root: Path):
        self.entry, self.root = entry, root
        if entry == "train_seg":
            self.options = (f"data.root={root}",)
            _, train_set = synthetic(root, "val"), synthetic(root, "train")
            self.files = [file.image for file in train_set.files]
            return
        self.options = ("data=imagenet", f"data.root={root}", "data.crop_size=32", "data.resize=36", "data.workers=0")
        for split, number in itertools.product(("train", "val"), range(24)):
            for name in ("n01", "n02"):
                pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
                trees.write(root / split / name / f"{number}.JPEG", pixels)
        self.files = sorted((root / "train").rglob("*.JPEG"))

    @contextmanager
    def damaged(self, each: int) -> Iterator[list[Path]]:
        """Every `each`th training image is truncated inside the context and restored after it."""
        contents = {file: file.read_bytes() for file in self.files[::each]}
        for file, content in contents.items():
            file.write_bytes(content[: len(content) // 2])
        try:
            yield list(contents)
        finally:
            for file, content in contents.items():
                file.write_bytes(content)

    def run(self, run_dir: Path, *options: str, **more) -> Run:
        return Run(run_dir, *self.options, *options, entry=self.entry, **more)

    def paused(self, run_dir: Path, *options: str) -> Run:
        """A run that stands still after its third step."""
        run = self.run(run_dir, *options, inject=SLOWLY).until_step(3)
        run.send(signal.SIGSTOP)
        return run

    @cached_property
    def whole(self) -> Path:
        """The folder of an uninterrupted run."""
        run_dir = self.root.with_name("whole")
        runs.finished(run_dir, *self.options, entry=self.entry)
        return run_dir


@pytest.fixture(scope="module")
def images_of(tmp_path_factory):
    """A function from an entry to its images."""
    return cache(lambda entry: Images(entry, tmp_path_factory.mktemp("data") / "images"))


@pytest.fixture(scope="module")
def street(images_of) -> Images:
    return images_of("train_seg")


SEG, IMAGENET = "train_seg", "train_imagenet"
CORRUPT = [
    case("corrupt image", "all images lose half of their bytes after the third step; restored afterwards", SEG),
    case("corrupt image", "a photograph loses half of its bytes after the third step; restored afterwards", IMAGENET),
]


@pytest.mark.parametrize("entry", CORRUPT)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named(tmp_path, images_of, entry, workers):
    images, workers = images_of(entry), f"data.workers={workers}"
    run = images.paused(tmp_path / "run", workers)
    with images.damaged(each=1) as damaged:
        run.send(signal.SIGCONT)
        output = run.fails()
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert any(str(file) in message for file in damaged)
    survived(tmp_path / "run", images.whole, *images.options, workers, entry=entry)


def in_the_eleventh_crop(fault):
    """Every process that reads crops does `fault` before its eleventh."""
    return partial(before_call, TrainingCrops, "__getitem__", 11, fault)


NOTHING_CAME = (
    "no data came for data.timeout_seconds=2 seconds: a disk or network folder hangs, or a process that reads"
)


@pytest.mark.faults
@pytest.mark.injects("stuck data worker", "sleeps for ever in the middle of a minibatch")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stuck_worker_is_reported(tmp_path, whole, workers):
    """One that is stopped (SIGSTOP) is not seen if it was to hand over a tensor: PyTorch waits for it without limit."""
    options = (f"data.workers={workers}", "data.timeout_seconds=2")
    Run(tmp_path / "run", *options, inject=in_the_eleventh_crop(runs.sleeps_for_ever)).fails(
        f"error: {NOTHING_CAME}", seconds=40
    )
    survived(tmp_path / "run", whole, *options)


DIED = "a process that reads images died: DataLoader worker"


@pytest.mark.faults
@pytest.mark.injects(
    "killed data worker", "SIGKILL to one of them at a random moment, as the kernel does without memory"
)
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_killed_at_any_moment_is_reported(tmp_path, whole, seed):
    """A worker of the training or of an evaluation, after the first step."""
    options = ("data.workers=2", "data.timeout_seconds=20")
    run = Run(tmp_path / "run", *options, inject=slow_crops).until_step(1)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    workers = children(run.process.pid)
    assert len(workers) >= 2, run.output
    os.kill(random.Random(seed).choice(workers), signal.SIGKILL)
    run.fails(f"error: {DIED}", seconds=60)
    survived(tmp_path / "run", whole, *options)


def takes_a_while(*_) -> None:
    time.sleep(0.25 / 4)


# A minibatch takes a quarter of a second: the run must outlast the test's random wait.
slow_crops = partial(before_call, TrainingCrops, "__getitem__", None, takes_a_while)


# The class index reads labels before the first step even if nothing else does.
@pytest.mark.faults
@pytest.mark.injects("a read hangs", "a FIFO in the place of an image or label before the first step")
@pytest.mark.parametrize(
    "part, options, named",
    [
        ("image", ("data.workers=2",), True),
        ("label", ("data.workers=1",), True),
        ("image", ("data.workers=2", "data.verify=false"), False),
        ("label", ("sampler=class_uniform", "sampler.folder={index}", "data.verify=false"), True),
    ],
)
def test_a_file_that_blocks_its_reader(tmp_path, street, part, options, named):
    options = ["data.timeout_seconds=2", *(key.format(index=tmp_path) for key in options)]
    runs.finished(tmp_path / "whole", *street.options, *options)
    for cached in tmp_path.glob("*/index.npz"):
        cached.unlink()
    files = [getattr(file, part) for file in synthetic(street.root, "train").files]
    for file in files:
        file.rename(file.with_suffix(".kept"))
        os.mkfifo(file)
    try:
        run = street.run(tmp_path / "run", *options)
        run.fails(f"error: {street.files[0]}: {NOTHING_CAME}" if named else f"error: {NOTHING_CAME}", seconds=40)
    finally:
        for file in files:
            file.with_suffix(".kept").rename(file)
    survived(tmp_path / "run", tmp_path / "whole", *street.options, *options)


def folder_is_gone(folder: Path) -> None:
    before_call(TrainingCrops, "__getitem__", 11, lambda *_: mount_dead(folder))


@needs_mounts
@pytest.mark.faults
@pytest.mark.injects("a read hangs", "the data's network folder is dead from the eleventh crop on")
def test_a_dead_network_folder(tmp_path, street):
    options = ("data.workers=2", "data.timeout_seconds=2")
    run = street.run(tmp_path / "run", *options, inject=partial(folder_is_gone, street.root))
    run.fails(f"error: {NOTHING_CAME}", seconds=40)
    survived(tmp_path / "run", street.whole, *street.options, *options)


def is_out_of_memory(*_) -> None:
    np.empty(2**60, np.uint8)


NEEDS = [
    case(
        "out of memory",
        "numpy is asked for 2^60 bytes in a data worker",
        *(in_the_eleventh_crop(is_out_of_memory), "out of memory in a process that reads images"),
    ),
    case(
        "small /dev/shm",
        "a tmpfs with room for two minibatches",
        *(mount_small_shared_memory, "/dev/shm is full (0 MiB, 0 MiB free)"),
        marks=(needs_mounts,),
    ),
]


@pytest.mark.parametrize("inject, message", NEEDS)
def test_what_workers_need_and_lack_is_reported(tmp_path, whole, inject, message):
    Run(tmp_path / "run", "data.workers=2", inject=inject).fails(f"error: {message}")
    survived(tmp_path / "run", whole)
