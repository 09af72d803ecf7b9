"""A run of the benchmark."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from omegaconf import MISSING
from PIL import Image

from datasets import SegmentationDataset, TrainingCrops, TrainingTransform, cityscapes, vistas, worker_init
from datasets.class_index import POSITIONS, index_label
from engine.provenance import provenance
from engine.schema.keys import key

from .memory import worker_mib
from .pictures import write_cityscapes, write_vistas
from .pipelines import Key, pipelines
from .startup import start_s

PNG, JPEG, JPEG_BASE = "PNG", "JPEG", "JPEG, base_size"


@dataclass
class LoaderBenchmark:
    out: str = MISSING  # FILE.json; the page is written beside it
    measure: bool = True
    png_size: list[int] = key([1024, 2048], least=64)  # height, width
    jpeg_size: list[int] = key([3648, 5472], least=64)
    base_size: int = key(2048, above=0)  # configs/data/vistas.yaml; the JPEGs are measured without it, too
    crop_size: int = key(872, above=0)
    pictures: int = key(4, above=0)  # different files of each kind
    rounds: int = key(40, above=0)
    minibatches: int = key(8, above=0)  # of four crops, for a worker's memory
    files: int = key(18000, above=0)  # images, for the start
    starts: int = key(5, above=0)


def measure(config: LoaderBenchmark) -> dict:
    """Times of all pipelines and of the class index, memory of a worker, a start; arguments and environment."""
    started_s = time.monotonic()
    known = {**provenance(), "threads": 1}
    with tempfile.TemporaryDirectory() as folder, _like_a_worker():
        png, jpeg, many = (Path(folder) / name for name in ("png", "jpeg", "many"))
        write_cityscapes(png, config.pictures, tuple(config.png_size))
        write_vistas(jpeg, config.pictures, tuple(config.jpeg_size))
        write_vistas(many, images=1, size=(24, 32), files=config.files)
        street, photographs = cityscapes(png, "train"), vistas(jpeg, "train")

        def crops(dataset, base_size: int | None = None) -> TrainingCrops:
            crop_size = (config.crop_size, config.crop_size)
            return TrainingCrops(dataset, TrainingTransform(crop_size, base_size=base_size), seed=0)

        sources = {
            PNG: crops(street),
            JPEG: crops(photographs),
            JPEG_BASE: crops(photographs, config.base_size),
        }
        rows, index_ms = [], {}
        for name, source in sources.items():
            chosen = pipelines(source, palette=source.dataset is photographs)
            keys = [(epoch, epoch % config.pictures) for epoch in range(config.rounds)]
            times_ms = interleaved(chosen, keys)
            rows += [_row(name, pipeline, times) for pipeline, times in times_ms.items()]
            if name != JPEG_BASE:
                index_ms |= interleaved({name: partial(index_of, source.dataset)}, keys)
            print(f"{time.monotonic() - started_s:6.1f} s  {name}", flush=True)
        keys = [(epoch, epoch % config.pictures) for epoch in range(4 * config.minibatches)]
        minibatches = [keys[i : i + 4] for i in range(0, len(keys), 4)]
        memory = {name: worker_mib(sources[name], minibatches) for name in (JPEG, JPEG_BASE)}
        starts = [start_s(many, Path(folder) / "cache") for _ in range(1 + config.starts)]
        return {
            "command": command_line(config),
            "arguments": {name: value for name, value in asdict(config).items() if name not in ("out", "measure")},
            "environment": known,
            "seconds": round(time.monotonic() - started_s, 1),
            "bytes_per_file": {name: _bytes_per_file(source) for name, source in sources.items() if name != JPEG_BASE},
            "index_ms": index_ms,
            "memory_mib": memory,
            "first_start_s": starts[0],
            "cached_starts_s": starts[1:],
            "rows": rows,
        }


def index_of(dataset: SegmentationDataset, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """What the class index keeps of a label, read from its file."""
    label = dataset.read_label(key[1])
    return index_label(label, len(dataset.classes), POSITIONS, np.random.default_rng(key))


def interleaved(chosen: dict[str, Callable[[Key], object]], keys: list[Key]) -> dict[str, list[float]]:
    """Milliseconds of every pipeline for every key. Each key is a round: all pipelines, in a new random order."""
    for pipeline in chosen.values():
        pipeline(keys[0])
    shuffle = random.Random(0)
    times_ms = {name: [] for name in chosen}
    for each in keys:
        for name in shuffle.sample(list(chosen), len(chosen)):
            start_s = time.perf_counter()
            chosen[name](each)
            times_ms[name].append(1e3 * (time.perf_counter() - start_s))
    return times_ms


def command_line(config: LoaderBenchmark) -> str:
    """The command line that measures the same again."""
    default = LoaderBenchmark()
    words = [
        f"{entry.name}={getattr(config, entry.name)}".replace(" ", "")
        for entry in fields(config)[2:]
        if getattr(config, entry.name) != getattr(default, entry.name)
    ]
    return " ".join(["python -m scripts.bench_loader", *words, "out=FILE.json"])


def _row(source: str, pipeline: str, times_ms: list[float]) -> dict:
    return {
        "source": source,
        "pipeline": pipeline,
        "median_ms": round(statistics.median(times_ms), 3),
        "times_ms": [round(ms, 3) for ms in times_ms],
    }


def _bytes_per_file(crops: TrainingCrops) -> dict[str, int]:
    files = crops.dataset.files
    return {kind: sum(getattr(f, kind).stat().st_size for f in files) // len(files) for kind in ("image", "label")}


@contextmanager
def _like_a_worker() -> Iterator[None]:
    """This process set up as a DataLoader's worker is: one thread for every library."""
    threads, blocks = (cv2.getNumThreads(), torch.get_num_threads()), Image.core.get_blocks_max()
    worker_init(0)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(threads[0])
        torch.set_num_threads(threads[1])
        Image.core.set_blocks_max(blocks)
