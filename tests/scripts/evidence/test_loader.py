"""The loader's benchmark: rivals that make the same crops, memory of a worker. No test asserts a time."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from datasets import (
    ClassificationCrops,
    RandomResizedCrop,
    TrainingCrops,
    TrainingTransform,
    camvid,
    cityscapes,
    vistas,
)
from datasets.imagenet import imagenet
from datasets.reading import EVERYTHING, read
from scripts.evidence.loader import classification
from scripts.evidence.loader.classification import CIFAR, DECODE_OPENCV, DECODE_TORCHVISION, PHOTOGRAPHS, PILLOW
from scripts.evidence.loader.crops import (
    DECODES,
    OPENCV,
    OURS,
    RIVALS,
    V2,
    V2_ANTIALIASED,
    pipelines,
    write_camvid,
    write_cityscapes,
    write_imagenet,
    write_vistas,
)
from scripts.evidence.loader.measurement import (
    JPEG,
    JPEG_BASE,
    PNG,
    SMALL,
    LoaderArguments,
    page,
    run,
    unique_mib,
    worker_mib,
)
from tests.scripts.evidence.records import measured

TENSORS = classification.V2
TINY = ["small_size=[72,96]", "small_crop_size=48", "png_size=[96,128]", "jpeg_size=[120,160]", "base_size=100"]
TINY += ["crop_size=72", "pictures=2", "rounds=3", "minibatches=1", "files=12", "starts=1"]
TINY += ["photograph_size=[64,96]", "photograph_crop_size=48", "photographs=3", "minibatch=4"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_camvid(folder / "small", 2, (72, 96))
    write_cityscapes(folder / "png", 2, (96, 128))
    write_vistas(folder / "jpeg", 2, (120, 160))
    png, jpeg = cityscapes(folder / "png", "train"), vistas(folder / "jpeg", "train")
    return {SMALL: camvid(folder / "small", "train"), PNG: png, JPEG: jpeg}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return measured("loader", run, tmp_path_factory.mktemp("benchmark"), *TINY)


@pytest.mark.parametrize("kind, base_size", [(SMALL, None), (PNG, None), (JPEG, None), (JPEG, 100)])
def test_all_pipelines_make_the_same_crops(pictures, kind, base_size):
    transform = TrainingTransform((100, 110), base_size=base_size, antialias=False)
    crops = TrainingCrops(pictures[kind], transform, seed=0)
    chosen = pipelines(crops, palette=kind == JPEG)
    padded = 0
    for epoch in range(12):
        key = (epoch, epoch % 2)
        size, _, _ = crops.geometry(key)
        image, label = (tensor.numpy().astype(int) for tensor in chosen[OURS](key))
        for name in RIVALS:
            other_image, other_label = (tensor.numpy() for tensor in chosen[name](key))
            assert other_image.dtype == other_label.dtype == np.uint8 and other_image.shape == (3, 100, 110)
            if name in (OPENCV, V2):
                assert np.abs(other_image - image).max() <= 2
            if name == OPENCV:
                assert np.array_equal(other_label, label)
            else:  # where a position lies between two pixels, torch may choose the other one
                assert (other_label != label).mean() < 0.02
        padded += size[0] < 100
    assert padded


def test_where_crops_shrink_a_lot_ours_are_closest_to_the_rival_that_antialiases(pictures):
    crops = TrainingCrops(pictures[JPEG], TrainingTransform((24, 24), (0.3, 0.5), base_size=100), seed=0)
    chosen = pipelines(crops, palette=True)
    names = (OURS, V2_ANTIALIASED, OPENCV, V2)
    for epoch in range(12):
        ours, *others = (chosen[name]((epoch, epoch % 2))[0].numpy().astype(int) for name in names)
        antialiased, *aliased = (np.abs(other - ours).mean() for other in others)
        assert antialiased < 0.8 * min(aliased)


def test_bare_decodes_return_the_pixels_of_both_files(pictures):
    for kind, dataset in pictures.items():
        crops = TrainingCrops(dataset, TrainingTransform((72, 80)), seed=0)
        chosen = pipelines(crops, palette=kind == JPEG)
        expected_image = dataset[1].image
        expected_label = dataset.decode_label(read(dataset.files[1].label), EVERYTHING)
        for name in DECODES:
            image, label = (np.asarray(part) for part in chosen[name]((0, 1)))
            image = image[..., ::-1] if "OpenCV" in name else image.transpose(1, 2, 0) if len(image) == 3 else image
            assert np.array_equal(image, expected_image) and np.array_equal(label.squeeze(), expected_label), name


def test_unique_memory_grows_with_what_a_process_touches():
    grows = "print(flush=True); input(); held = b'x' * 2**26; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        before = unique_mib(process.pid)
        process.stdin.write(b"\n"), process.stdin.flush()
        process.stdout.readline()
        assert 63.9 < unique_mib(process.pid) - before < 66
        process.stdin.close()


def test_a_worker_that_reads_has_more_memory_than_one_that_does_not(pictures):
    crops = TrainingCrops(pictures[JPEG], TrainingTransform((900, 900), base_size=1000), seed=0)
    mib = worker_mib(crops, [[(0, 0), (0, 1), (1, 0), (1, 1)]] * 2)
    assert 0 < mib["idle"] < mib["peak"]


def test_a_tiny_run_measures_everything(record):
    result, text = record
    assert {(row["source"], row["pipeline"]) for row in result["rows"]} == {
        (source, pipeline) for source in (SMALL, PNG, JPEG, JPEG_BASE) for pipeline in (OURS, *DECODES, *RIVALS)
    }
    assert all(len(row["times_ms"]) == 3 and row["median_ms"] > 0 for row in result["rows"])
    assert {source: len(times) for source, times in result["index_ms"].items()} == {PNG: 3, JPEG: 3}
    assert len(result["cached_starts_s"]) == 1 and result["first_start_s"].keys() == result["cached_starts_s"][0].keys()
    times = result["classification"]["times_ms"]
    assert times[PHOTOGRAPHS].keys() == {OURS, PILLOW, TENSORS, DECODE_OPENCV, DECODE_TORCHVISION}
    assert times[CIFAR].keys() == {OURS, PILLOW, TENSORS}
    assert all(len(ms) == 3 and min(ms) > 0 for of_source in times.values() for ms in of_source.values())
    assert "96x64 pixels" in text and "minibatches of 4" in text
    assert text.count(f"| {OURS} |") == 6 and f"python -m scripts.evidence.loader {TINY[0]}" in text


def with_times(result: dict, times_ms: dict[str, list[float]]) -> dict:
    """The record with these times of the pipelines, for all sources."""
    rows = [{"pipeline": name, "median_ms": sorted(times)[1], "times_ms": times} for name, times in times_ms.items()]
    return {**result, "rows": [{"source": source, **row} for source in (SMALL, PNG, JPEG) for row in rows]}


def test_the_page_compares_pipelines_by_the_ratios_within_a_round_alone(record):
    """The rival with the least median time is not the fastest: its crops may have been cheaper."""
    times_ms = {name: [99.0, 99.0, 99.0] for name in (*DECODES, *RIVALS)}
    times_ms |= {OURS: [1.0, 10.0, 20.0], OPENCV: [4.0, 21.0, 100.0], V2: [3.0, 30.0, 60.0]}  # 4 and 3 times ours
    result = with_times(record[0], times_ms)
    row = next(line for line in page(result, None).splitlines() if line.startswith(f"| {V2} "))
    assert row.startswith(f"| {V2} | 30.0 | 33.3 | ") and row.endswith(" | 3.00 (3.00 – 3.00) |")


def test_pipelines_of_classification_make_the_same_crops(tmp_path):
    write_imagenet(tmp_path, 6, (90, 120))
    photographs = imagenet(tmp_path, "train")
    sizes = {photographs.image(number).shape[:2] for number in range(6)}
    assert sizes == {(72, 96), (90, 120), (108, 144), (96, 72), (120, 90), (144, 108)}
    chosen = classification.of_photographs(ClassificationCrops(photographs, RandomResizedCrop(64, colours=()), seed=3))
    mirrored = 0
    for epoch in range(4):
        for number in range(6):
            ours, *others = (chosen[name]((epoch, number)).numpy().astype(int) for name in (OURS, PILLOW, TENSORS))
            assert all(other.shape == (3, 64, 64) and np.abs(other - ours).max() <= 2 for other in others)
            mirrored += np.abs(ours - ours[..., ::-1]).max() > 10
    assert mirrored  # so equal crops are equally mirrored
    decoded = chosen[DECODE_OPENCV]((0, 1))[..., ::-1], chosen[DECODE_TORCHVISION]((0, 1)).permute(1, 2, 0).numpy()
    assert all(np.array_equal(pixels, photographs.image(1)) for pixels in decoded)

    noise = classification.drawn_cifar(images=12)
    batches = {name: pipeline(1) for name, pipeline in classification.of_cifar(noise, minibatch=8).items()}
    for name, batch in batches.items():
        assert batch["image"].shape == (8, 3, 32, 32) and batch["image"].dtype == torch.uint8, name
        assert batch["label"].tolist() == batches[OURS]["label"].tolist(), name


def test_tables_of_classification_compare_within_rounds():
    times = {
        PHOTOGRAPHS: {OURS: [1.0, 2.0, 4.0], PILLOW: [1.5, 3.0, 6.0], TENSORS: [0.5, 1.9, 8.0]},
        CIFAR: {OURS: [1.0, 1.0, 1.0], PILLOW: [9.0, 9.0, 9.0], TENSORS: [8.0, 8.0, 8.0]},
    }
    record = {"arguments": vars(LoaderArguments()), "classification": {"times_ms": times, "bytes_per_file": 2048}}
    lines = "\n".join(classification.sections(record)).splitlines()
    row = next(line for line in lines if line.startswith(f"| {OURS} | 1.00"))
    assert row == f"| {OURS} | 1.00 | 128,000 | 1 |"
