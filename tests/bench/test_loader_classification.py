"""The loader's benchmark of classification: rivals that make the same crops, targets. No test asserts a time."""

import numpy as np
import torch

from datasets import ClassificationCrops, RandomResizedCrop, imagenet
from scripts.bench.frame import MISS, NOT_MEASURED, PASS
from scripts.bench.loader import LoaderArguments
from scripts.bench.loader_classification import (
    CIFAR,
    DECODE_OPENCV,
    DECODE_TORCHVISION,
    PHOTOGRAPHS,
    PILLOW,
    V2,
    drawn_cifar,
    of_cifar,
    of_photographs,
    sections,
    targets,
)
from scripts.bench.loader_pictures import write_imagenet
from scripts.bench.loader_pipelines import OURS


def test_all_pipelines_make_the_same_crops(tmp_path):
    write_imagenet(tmp_path, 6, (90, 120))
    photographs = imagenet(tmp_path, "train")
    sizes = {photographs.image(number).shape[:2] for number in range(6)}
    assert sizes == {(72, 96), (90, 120), (108, 144), (96, 72), (120, 90), (144, 108)}
    chosen = of_photographs(ClassificationCrops(photographs, RandomResizedCrop(64, colours=()), seed=3))
    mirrored = 0
    for epoch in range(4):
        for number in range(6):
            ours, *others = (chosen[name]((epoch, number)).numpy().astype(int) for name in (OURS, PILLOW, V2))
            assert all(other.shape == (3, 64, 64) and np.abs(other - ours).max() <= 2 for other in others)
            mirrored += np.abs(ours - ours[..., ::-1]).max() > 10
    assert mirrored  # so equal crops are equally mirrored
    decoded = chosen[DECODE_OPENCV]((0, 1))[..., ::-1], chosen[DECODE_TORCHVISION]((0, 1)).permute(1, 2, 0).numpy()
    assert all(np.array_equal(pixels, photographs.image(1)) for pixels in decoded)


def test_cifar_minibatches_have_the_same_form():
    noise = drawn_cifar(images=12)
    for name, pipeline in of_cifar(noise, minibatch=8).items():
        batch = pipeline(1)
        assert batch["image"].shape == (8, 3, 32, 32) and batch["image"].dtype == torch.uint8, name
        assert batch["label"].tolist() == of_cifar(noise, minibatch=8)[OURS](1)["label"].tolist(), name


def test_targets_compare_within_rounds_at_the_required_sizes():
    times = {
        PHOTOGRAPHS: {OURS: [1.0, 2.0, 4.0], PILLOW: [1.5, 3.0, 6.0], V2: [0.5, 1.9, 8.0]},
        CIFAR: {OURS: [1.0, 1.0, 1.0], PILLOW: [9.0, 9.0, 9.0], V2: [8.0, 8.0, 8.0]},
    }
    record = {"arguments": vars(LoaderArguments()), "classification": {"times_ms": times, "bytes_per_file": 2048}}
    found = [(target.measured, target.verdict) for target in targets(record)]
    assert found[:2] == [(f"1.50 ({PILLOW})", PASS), (f"0.95 ({V2})", MISS)]
    assert found[2] == (f"8.00 – 9.00, 2 of 2; worst {V2}", PASS)
    row = next(line for line in sections(record) if line.startswith(f"| {OURS} | 1.00"))
    assert row == f"| {OURS} | 1.00 | 128,000 | 1 |"


def test_a_record_without_this_part_has_targets_that_are_not_measured():
    for record in ({"arguments": {}}, {"arguments": vars(LoaderArguments())}):
        assert {target.verdict for target in targets(record)} == {NOT_MEASURED} and list(sections(record)) == []
