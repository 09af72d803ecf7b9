import itertools
import os

import numpy as np
import pytest
import torch

from datasets import (
    CentreCrop,
    ClassificationCrops,
    EvaluatedImages,
    PaddedCrop,
    RandomResizedCrop,
    ResizedRandomCrop,
    ShuffledMinibatches,
    TenCrops,
    cifar10,
    collated,
    imagenet,
)
from datasets.classification import mean_image
from datasets.workers import Loader
from tests.datasets import classification_trees as trees


@pytest.fixture
def files(tmp_path):
    return imagenet(trees.imagenet(tmp_path / "imagenet"), "train")


@pytest.fixture
def memory(tmp_path):
    return cifar10(trees.cifar10_binary(tmp_path / "cifar", images=8), "train")


def crops_of(dataset, seed: int = 0, **options) -> ClassificationCrops:
    transform = RandomResizedCrop(24) if dataset.pixels is None else PaddedCrop()
    return ClassificationCrops(dataset, transform, seed, **options)


def minibatches(dataset, workers: int, start_step: int = 0, seed: int = 0) -> list[dict]:
    sampler = ShuffledMinibatches(len(dataset), crops_per_minibatch=3, seed=0, steps=2 * len(dataset) // 3)
    sampler.start_step = start_step
    return list(Loader(crops_of(dataset, seed), workers, batch_sampler=sampler, collate_fn=collated))


def same(a: dict, b: dict) -> bool:
    return torch.equal(a["image"], b["image"]) and torch.equal(a["label"], b["label"]) and a["name"] == b["name"]


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_minibatches_do_not_depend_on_workers_or_where_a_run_starts(kind, request):
    dataset = request.getfixturevalue(kind)
    alone = minibatches(dataset, workers=0)
    assert len(alone) == 2 * len(dataset) // 3  # two epochs
    for workers, start_step in ((2, 0), (2, 3), (0, len(alone) - 1)):
        others = minibatches(dataset, workers, start_step)
        assert all(same(a, b) for a, b in zip(alone[start_step:], others, strict=True))
    assert not same(alone[0], minibatches(dataset, 0, seed=1)[0])


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_minibatch_is_its_items_in_order(kind, request):
    dataset = request.getfixturevalue(kind)
    crops, size = crops_of(dataset), 24 if kind == "files" else 32
    keys = [(3, 4), (3, 0), (3, 5)]
    minibatch = collated(crops.__getitems__(keys))
    assert minibatch["image"].shape == (3, 3, size, size) and minibatch["image"].dtype == torch.uint8
    assert minibatch["label"].dtype == torch.int64 and minibatch["image"].is_contiguous()
    assert minibatch["label"].tolist() == [dataset.label(number) for _, number in keys]
    assert list(minibatch["name"]) == [dataset.image_name(number) for _, number in keys]
    assert list(minibatch["skipped"]) == ["", "", ""]
    for place, key in enumerate(keys):
        item = crops[key]
        assert item.keys() == minibatch.keys() and type(item["label"]) is int and item["image"].is_contiguous()
        assert torch.equal(item["image"], minibatch["image"][place]) and item["label"] == minibatch["label"][place]
        assert item["name"] == minibatch["name"][place] and item["skipped"] == ""


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_crop_depends_on_seed_epoch_and_image(kind, request):
    dataset = request.getfixturevalue(kind)
    images = [
        crops_of(dataset, seed)[epoch, number]["image"]
        for seed in (0, 1)
        for epoch in (0, 1, 2)
        for number in (0, 1, 2, 3)
    ]
    assert torch.equal(images[0], crops_of(dataset, 0)[0, 0]["image"])
    different = {image.numpy().tobytes() for image in images}
    assert len(different) == len(images)


def test_in_memory_every_epoch_draws_corners_and_flips_anew(memory):
    crops = crops_of(memory)
    images = {crops[epoch, 0]["image"].numpy().tobytes() for epoch in range(40)}
    assert len(images) > 30  # of 162 possible


def test_images_in_memory_may_have_the_input_of_imagenet_and_images_in_files_the_input_of_cifar(files, memory):
    enlarged = ClassificationCrops(memory, ResizedRandomCrop(64, 56), seed=0)
    batch = collated(enlarged.__getitems__([(0, 1), (0, 2)]))
    assert batch["image"].shape == (2, 3, 56, 56) and batch["label"].tolist() == [1, 2]
    padded = ClassificationCrops(files, PaddedCrop(32, 0), seed=0)
    assert collated(padded.__getitems__([(0, 1), (0, 2)]))["image"].shape == (2, 3, 32, 32)
    assert torch.equal(padded[5, 1]["image"], padded[5, 1]["image"])


def test_a_mean_image_is_subtracted_before_padding(memory):
    """Exactly: crops of the float64 difference with zeros around it, rounded once. They are where they were without."""
    images = len(memory)
    mean = [sum(column) / images for column in memory.pixels.reshape(images, -1).T.tolist()]  # of Python's integers
    assert np.array_equal(mean_image(memory), np.reshape(mean, (3, 32, 32)))
    difference = torch.from_numpy(memory.pixels) - torch.tensor(mean, dtype=torch.float64).view(3, 32, 32)
    transform = PaddedCrop(32, 2, fill=(0, 0, 0))
    crops = ClassificationCrops(memory.minus(mean_image(memory)), transform, seed=0)
    numbers = range(0, images, 3)
    batch = collated(crops.__getitems__([(4, number) for number in numbers]))
    assert batch["image"].dtype == torch.float32 and batch["image"].is_contiguous()
    as_stored = ClassificationCrops(memory, transform, seed=0)
    corners = set()
    for crop, number in zip(batch["image"], numbers, strict=True):
        found = [
            (top, left, mirrored)
            for top, left, mirrored in itertools.product(range(5), range(5), (False, True))
            if torch.equal(window(difference[number], top, left, mirrored).float(), crop)
        ]
        assert len(found) == 1 and torch.equal(crops[4, number]["image"], crop)
        stored = as_stored[4, number]["image"]
        assert torch.equal(window(torch.from_numpy(memory.pixels[number]), *found[0]), stored)
        corners.update(found)
    assert len(corners) > 5


def window(image: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    """A crop of 32x32 pixels of an image (3, 32, 32) with two pixels of zeros around it."""
    crop = torch.nn.functional.pad(image, (2, 2, 2, 2))[:, top : top + 32, left : left + 32]
    return crop.flip(2) if mirrored else crop


def test_evaluated_images_are_minus_the_mean_image_of_another_split(memory, tmp_path):
    mean = mean_image(memory)
    test = cifar10(tmp_path / "cifar", "test")
    source = EvaluatedImages(test.minus(mean), None)
    batch = source.__getitems__([3, 0])
    assert np.array_equal(batch["image"].numpy(), (test.pixels[[3, 0]] - mean).astype(np.float32))
    assert torch.equal(source[3]["image"], batch["image"][0]) and source[3]["label"] == test.label(3)
    assert EvaluatedImages(test, None)[3]["image"].dtype == torch.uint8  # the split itself is as it was


def test_unreadable_images_are_replaced_by_the_next_ones_only_if_asked(files):
    for number in (2, 3):
        files.path(number).write_bytes(b"")
    with pytest.raises(ValueError, match=f"^{files.path(2)}: the file is empty"):
        crops_of(files)[0, 2]
    item = crops_of(files, skip_unreadable=True)[0, 2]
    assert item["name"] == files.image_name(4) and item["label"] == 2
    first, second = item["skipped"].splitlines()
    assert str(files.path(2)) in first and str(files.path(3)) in second
    assert torch.equal(item["image"], crops_of(files)[0, 4]["image"])
    for number in range(len(files)):
        files.path(number).write_bytes(b"")
    with pytest.raises(ValueError, match="9 images in a row cannot be read"):
        crops_of(files, skip_unreadable=True)[0, 2]


def test_a_crop_opens_its_file_once(files, monkeypatch):
    opened, read_bytes = [], type(files.path(0)).read_bytes
    monkeypatch.setattr(type(files.path(0)), "read_bytes", lambda path: opened.append(path) or read_bytes(path))
    crops_of(files)[0, 2]
    assert opened == [files.path(2)]


def test_evaluated_images_of_files(files):
    centre, ten = EvaluatedImages(files, CentreCrop(32, 24)), EvaluatedImages(files, TenCrops(32, 24))
    assert len(centre) == 6
    (batch,) = Loader(ten, 0, batch_size=6, collate_fn=collated)
    assert batch["image"].shape == (6, 10, 3, 24, 24) and batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [0, 0, 1, 1, 2, 2] and batch["name"][5] == files.image_name(5)
    for number in range(6):
        item = centre[number]
        assert item.keys() == {"image", "label", "name"} and type(item["label"]) is int
        expected = CentreCrop(32, 24)(files.image(number)).transpose(2, 0, 1)
        assert np.array_equal(item["image"].numpy(), expected)
        assert torch.equal(item["image"], batch["image"][number, 4]) and item["image"].is_contiguous()


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_images_in_memory_are_evaluated_by_the_minibatch(memory, workers):
    source = EvaluatedImages(memory, None)
    batches = list(Loader(source, workers, sampler=range(1, 40, 2), batch_size=8, collate_fn=collated))
    assert [len(batch["label"]) for batch in batches] == [8, 8, 4]
    assert np.array_equal(torch.cat([batch["image"] for batch in batches]).numpy(), memory.pixels[1::2])
    assert torch.cat([batch["label"] for batch in batches]).tolist() == memory.labels[1::2].tolist()
    assert batches[0]["name"][1] == memory.image_name(3) == source[3]["name"]
    assert np.array_equal(source[3]["image"].numpy(), memory.pixels[3])


def test_a_minibatch_does_not_share_memory_with_the_dataset(memory):
    for batch in (EvaluatedImages(memory, None).__getitems__([0, 1]), crops_of(memory).__getitems__([(0, 0), (0, 1)])):
        before = memory.pixels.copy()
        batch["image"].zero_(), batch["label"].fill_(7)
        assert np.array_equal(memory.pixels, before) and memory.label(0) == 0


def test_workers_share_the_memory_of_a_large_list(files):
    """Names are one array, not a million Python objects that every worker would copy by counting references."""
    assert files.files.names.dtype.kind == "S" and files.labels.dtype == np.int64
    assert os.fsencode(files.image_name(3)) == files.files.names[3]
