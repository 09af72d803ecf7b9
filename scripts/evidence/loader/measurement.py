"""Speed of the training crops, against decoding their files and against resizing whole images; memory and start-up:

    python -m scripts.evidence.loader out=FILE.json
    python -m scripts.evidence.loader rounds=5 starts=1 out=FILE.json
    python -m scripts.evidence.loader measure=false out=FILE.json

The files are drawn.
"""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datasets import (
    ClassUniformMinibatches,
    SegmentationDataset,
    TrainingCrops,
    TrainingTransform,
    camvid,
    cityscapes,
    imagenet,
    index_classes,
    verify,
    vistas,
    worker_init,
)
from datasets.class_index import POSITIONS, index_label
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.frame import time_ratio
from scripts.evidence.loader import classification
from scripts.evidence.loader.crops import (
    DECODES,
    OURS,
    Key,
    pipelines,
    write_camvid,
    write_cityscapes,
    write_imagenet,
    write_vistas,
)
from scripts.evidence.measuring import timed_over
from scripts.reports.markdown import Columns, columns, section

T = TypeVar("T")
Minibatches = Sequence[Sequence[Key]]
INTERVAL_S = 0.002  # between two looks at a worker's memory


@contextmanager
def like_a_worker() -> Iterator[None]:
    """Context in which this process is set up like a DataLoader worker, with one thread per library."""
    threads, blocks = (cv2.getNumThreads(), torch.get_num_threads()), Image.core.get_blocks_max()
    worker_init(0)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(threads[0])
        torch.set_num_threads(threads[1])
        Image.core.set_blocks_max(blocks)


def worker_mib(crops: TrainingCrops, minibatches: Minibatches) -> dict[str, float]:
    """Measure a worker's own MiB before, while and after it makes `minibatches`: {"idle", "peak", "after"}."""
    return {"idle": _watched(crops, [])["after"], **_watched(crops, minibatches)}


def unique_mib(pid: int) -> float:
    """MiB of the pages that no other process has (Linux only)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _watched(crops: TrainingCrops, minibatches: Minibatches) -> dict[str, float]:
    before = set(multiprocessing.active_children())
    batch_sampler = [list(keys) for keys in minibatches]
    loader = iter(DataLoader(crops, batch_sampler=batch_sampler, num_workers=1, worker_init_fn=worker_init))
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    pid, done = worker.pid, threading.Event()
    seen = [unique_mib(pid)]

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            seen.append(unique_mib(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in minibatches:
            next(loader)
        done.wait(0.5)  # until the worker has started, or freed its last minibatch
    finally:
        done.set()
        watcher.join()
    return {"peak": max(seen), "after": unique_mib(pid)}


def start_s(root: Path, cache: Path) -> dict[str, float]:
    """Seconds that a new process spends on each step from its imports to the first keys of a training.

    `cache` is the folder that remembers which files were verified and indexed.
    """
    with patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_start, root).result()


def _start(root: Path) -> dict[str, float]:
    times_s: dict[str, float] = {}

    def timed(step: str, run: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        result = run()
        times_s[step] = time.perf_counter() - started_s
        return result

    dataset = timed("list and pair files", lambda: vistas(root, "train"))
    timed("verify", lambda: verify(dataset))
    index = timed("class index", lambda: index_classes(dataset))
    timed("first keys", lambda: next(iter(ClassUniformMinibatches(index, crops_per_minibatch=1, seed=0, steps=1))))
    return times_s


SMALL, PNG, JPEG, JPEG_BASE = "small PNG", "PNG", "JPEG", "JPEG, base_size"

Rows = dict[str, dict]  # of one source, by pipeline


@dataclass
class LoaderArguments(frame.Arguments):
    small_size: list[int] = key([360, 480], least=64)  # CamVid's
    small_crop_size: int = key(240, above=0)  # configs/data/camvid.yaml
    png_size: list[int] = key([1024, 2048], least=64)  # height, width
    jpeg_size: list[int] = key([3648, 5472], least=64)  # height, width
    base_size: int = key(2048, above=0)  # configs/data/vistas.yaml; JPEGs are also measured without it
    crop_size: int = key(872, above=0)  # pixels, of large images
    pictures: int = key(4, above=0)  # different files of each kind
    rounds: int = key(40, above=0)  # each times every pipeline once
    minibatches: int = key(8, above=0)  # of four crops, for a worker's memory
    files: int = key(18000, above=0)  # images, for the start
    starts: int = key(5, above=0)  # of a training's data, which are timed
    photograph_size: list[int] = key([375, 500], least=64)  # mean size of ImageNet-like JPEGs
    photograph_crop_size: int = key(224, above=0)  # pixels
    photographs: int = key(24, above=0)  # different files
    minibatch: int = key(128, above=0)  # of CIFAR images


def measure(arguments: LoaderArguments, clock: frame.Clock) -> dict:
    """Times of all pipelines and of the class index, memory of a worker, starts."""
    rows: list[dict] = []
    index_ms: dict[str, list[float]] = {}
    keys = [(epoch, epoch % arguments.pictures) for epoch in range(max(arguments.rounds, 4 * arguments.minibatches))]
    with tempfile.TemporaryDirectory() as folder, like_a_worker():
        small, png, jpeg, many = (Path(folder) / name for name in ("small", "png", "jpeg", "many"))
        write_camvid(small, arguments.pictures, arguments.small_size)
        write_cityscapes(png, arguments.pictures, arguments.png_size)
        write_vistas(jpeg, arguments.pictures, arguments.jpeg_size)
        write_vistas(many, images=1, size=(24, 32), files=arguments.files)
        photographs, large = vistas(jpeg, "train"), arguments.crop_size
        sources = {
            name: TrainingCrops(dataset, TrainingTransform((side, side), base_size=base_size), seed=0)
            for name, dataset, side, base_size in (
                (SMALL, camvid(small, "train"), arguments.small_crop_size, None),
                (PNG, cityscapes(png, "train"), large, None),
                (JPEG, photographs, large, None),
                (JPEG_BASE, photographs, large, arguments.base_size),
            )
        }
        for source, crops in sources.items():
            chosen = pipelines(crops, palette=crops.dataset is photographs)
            rows += [
                {"source": source, "pipeline": name, "median_ms": round(statistics.median(times), 3), "times_ms": times}
                for name, times in timed_over(chosen, keys[: arguments.rounds]).items()
            ]
            clock.report(source)
        for source in (PNG, JPEG):
            index = partial(index_of, sources[source].dataset)
            index_ms |= timed_over({source: index}, keys[: arguments.rounds])
        minibatches = [keys[4 * i : 4 * i + 4] for i in range(arguments.minibatches)]
        memory = {name: worker_mib(sources[name], minibatches) for name in (JPEG, JPEG_BASE)}
        write_imagenet(Path(folder) / "photographs", arguments.photographs, arguments.photograph_size)
        drawn = imagenet(Path(folder) / "photographs", "train")
        images = classification.measure(drawn, arguments.photograph_crop_size, arguments.minibatch, arguments.rounds)
        clock.report("classification")
        first_start, *cached_starts = (start_s(many, Path(folder) / "cache") for _ in range(1 + arguments.starts))
        return {
            "environment": {"threads": 1},
            "bytes_per_file": {source: _bytes_per_file(sources[source]) for source in (SMALL, PNG, JPEG)},
            "index_ms": index_ms,
            "memory_mib": memory,
            "first_start_s": first_start,
            "cached_starts_s": cached_starts,
            "classification": images,
            "rows": rows,
        }


def index_of(dataset: SegmentationDataset, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Read a label and return what the class index keeps of it."""
    label = dataset.read_label(key[1])
    return index_label(label, len(dataset.classes), POSITIONS, np.random.default_rng(key))


def _bytes_per_file(crops: TrainingCrops) -> dict[str, int]:
    files = crops.dataset.files
    return {kind: sum(getattr(f, kind).stat().st_size for f in files) // len(files) for kind in ("image", "label")}


PIPELINES: Columns = [
    ("pipeline", "{pipeline}"),
    ("ms", "{median_ms:.1f}"),
    ("samples/s per core", lambda row: f"{1e3 / row['median_ms']:.1f}"),
    ("time to bare decode", lambda row: frame.relative_time(row, fastest(row["beside"], DECODES))),
    ("time to ours", lambda row: frame.relative_time(row, OURS)),
]
INDEX: Columns = [("source", "{source}"), ("a label read and indexed, ms", "{ms:.1f}")]
START: Columns = [("", "{step}"), ("first, s", "{first:.2f}"), ("cached, s", "{cached:.2f}")]
MEMORY: Columns = [
    ("source", "{source}"),
    ("idle, MiB", "{idle:.0f}"),
    ("peak, MiB", "{peak:.0f}"),
    ("afterwards, MiB", "{after:.0f}"),
]


def page(result: dict, _: str) -> str:
    sources = [
        section(_title(name, result), columns(rows.values(), PIPELINES)) for name, rows in by_source(result).items()
    ]
    index = [{"source": source, "ms": statistics.median(ms)} for source, ms in result["index_ms"].items()]
    steps = [
        {"step": step, "first": first, "cached": statistics.median(start[step] for start in result["cached_starts_s"])}
        for step, first in result["first_start_s"].items()
    ]
    return frame.page_text(
        "loader",
        result,
        sources=[*sources, *classification.sections(result)],
        index=columns(index, INDEX),
        memory=columns(({"source": source, **mib} for source, mib in result["memory_mib"].items()), MEMORY),
        start=columns(steps, START),
    )


def by_source(result: dict) -> dict[str, Rows]:
    return frame.grouped(result["rows"], ["source"], "pipeline")


def fastest(rows: Rows, among: tuple[str, ...]) -> str:
    """The pipeline with the smallest time relative to ours."""
    return min(among, key=lambda name: time_ratio(rows, name, OURS).median)


def _title(source: str, result: dict) -> str:
    """The source with the size of its pictures and files."""
    kind = JPEG if source == JPEG_BASE else source
    height, width = result["arguments"][{SMALL: "small_size", PNG: "png_size", JPEG: "jpeg_size"}[kind]]
    size = f"{source}={result['arguments']['base_size']}" if source == JPEG_BASE else source
    kib = {name: bytes_ / 1024 for name, bytes_ in result["bytes_per_file"][kind].items()}
    return f"{size}: {width}x{height} pixels, files of {kib['image']:.0f} KiB, labels of {kib['label']:.0f} KiB"


run, main = frame.benchmark("loader", LoaderArguments, measure, page)
