import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from datasets import (
    ClassUniformMinibatches,
    ColourJitter,
    Draw,
    ShuffledMinibatches,
    TrainingCrops,
    TrainingTransform,
    WholeImages,
    camvid,
    cityscapes,
    index_classes,
    worker_init,
)
from tests import trees
from tests.trees import write


def crops_of(root, seed: int = 0, **options) -> TrainingCrops:
    return TrainingCrops(camvid(root, "train"), TrainingTransform((16, 20), **options), seed=seed)


def minibatches(root, workers: int, start_step: int = 0, **options) -> list[dict]:
    sampler = ShuffledMinibatches(images=6, crops_per_minibatch=2, seed=0, steps=7, start_step=start_step)
    loader = DataLoader(
        crops_of(root, **options), batch_sampler=sampler, num_workers=workers, worker_init_fn=worker_init
    )
    return list(loader)


def same(a: dict, b: dict) -> bool:
    return torch.equal(a["image"], b["image"]) and torch.equal(a["label"], b["label"]) and a["name"] == b["name"]


@pytest.mark.parametrize("options", [{}, {"colour_jitter": ColourJitter(0.4, 0.4, 0.4, 0.1)}], ids=["plain", "jitter"])
def test_same_crops_whatever_the_workers_and_after_resuming(camvid_folders, options):
    alone, two = (minibatches(camvid_folders, workers, **options) for workers in (0, 2))
    assert len(alone) == 7 and all(same(a, b) for a, b in zip(alone, two, strict=True))
    resumed = minibatches(camvid_folders, workers=2, start_step=4, **options)
    assert all(same(a, b) for a, b in zip(alone[4:], resumed, strict=True))


def test_crop_depends_on_seed_epoch_and_index(camvid_folders):
    crops, other_seed = crops_of(camvid_folders, seed=0), crops_of(camvid_folders, seed=1)
    assert same(crops[0, 3], crops[0, 3])
    assert not same(crops[0, 3], crops[1, 3])
    assert not same(crops[0, 3], other_seed[0, 3])


@pytest.mark.parametrize("base_size", [None, 17, 90])
def test_a_crop_decodes_what_it_needs_of_the_image_and_gives_what_the_whole_gives(camvid_folders, base_size):
    dataset = camvid(camvid_folders, "train")
    transform = TrainingTransform((16, 20), base_size=base_size)
    crops = TrainingCrops(dataset, transform, seed=3)
    for epoch in range(20):
        for index in range(6):
            whole = dataset[index]
            rng = np.random.default_rng([3, epoch, index])
            image, label = transform(whole.image, whole.label, rng, pixel=(5, 9))
            crop = crops[Draw(epoch, index, pixel=(5, 9))]
            assert np.array_equal(crop["image"].permute(1, 2, 0).numpy(), image)
            assert np.array_equal(crop["label"].numpy(), label)


@pytest.mark.parametrize("tree", [trees.camvid_annot, trees.camvid_folders], ids=["png", "jpeg"])
def test_a_crop_opens_its_files_once(tree, tmp_path):
    crops = crops_of(tree(tmp_path / "data"))
    opened: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, arguments: opened.append(str(arguments[0])) if watching and event == "open" else None
    )
    crops[0, 2]
    watching = False
    files = crops.dataset.files[2]
    assert Counter(path for path in opened if str(tmp_path) in path) == {str(files.image): 1, str(files.label): 1}


def test_sizes_of_image_and_label_are_compared_while_training(camvid_folders):
    write(camvid_folders / "train" / "labels" / "0001TP_000002.png", np.zeros((12, 20), np.uint8))
    with pytest.raises(ValueError, match="0001TP_000002.png: the label is 20x12 pixels and its image .* is 40x24"):
        crops_of(camvid_folders)[0, 2]


def test_unreadable_images_are_replaced_until_too_many_follow_each_other(camvid_folders):
    crops = TrainingCrops(camvid(camvid_folders, "train"), TrainingTransform((16, 20)), seed=0, skip_unreadable=True)
    images = [entry.image for entry in crops.dataset.files]
    images[2].write_bytes(b"")
    item = crops[0, 2]
    assert item["name"] == "0001TP_000003" and item["skipped"].startswith(f"{images[2]}: the file is empty")
    for image in images:
        image.write_bytes(b"")
    message = "^9 images in a row cannot be read: too many to skip, .*; the last one: .*is empty"
    with pytest.raises(ValueError, match=message):
        crops[0, 2]


def test_training_crops_are_uint8_and_channels_first(camvid_folders):
    item = crops_of(camvid_folders)[0, 1]
    assert item["image"].shape == (3, 16, 20) and item["image"].dtype == torch.uint8
    assert item["label"].shape == (16, 20) and item["label"].dtype == torch.uint8
    assert item["image"].is_contiguous() and item["label"].is_contiguous()
    assert item["name"] == "0001TP_000001"


def test_whole_images_are_the_samples(camvid_folders):
    dataset = camvid(camvid_folders, "val")
    item = WholeImages(dataset)[1]
    assert np.array_equal(item["image"].permute(1, 2, 0).numpy(), dataset[1].image)
    assert np.array_equal(item["label"].numpy(), dataset[1].label)
    assert item["name"] == "0001TP_000001"


def test_whole_images_without_labels(cityscapes_root):
    items = list(DataLoader(WholeImages(cityscapes(cityscapes_root, "test")), batch_size=1))
    assert len(items) == 2 and all("label" not in item for item in items)


def test_training_on_a_split_without_labels_says_so(cityscapes_root):
    crops = TrainingCrops(cityscapes(cityscapes_root, "test"), TrainingTransform((8, 8)), seed=0)
    with pytest.raises(ValueError, match="no labels in split 'test'"):
        crops[0, 0]


@pytest.fixture
def sparse(tmp_path):
    """10 images of class 0, each with one pixel of a class of its own, most of them on a border or in a corner."""
    root = tmp_path / "sparse"
    borders = [(0, 0), (0, 39), (23, 0), (23, 39), (0, 17), (23, 17), (11, 0), (11, 39), (11, 17), (1, 1)]
    for image, pixel in enumerate(borders):
        label = np.zeros((24, 40), np.uint8)
        label[pixel] = image + 1
        write(root / "train" / "images" / f"{image}.jpg", np.zeros((24, 40, 3), np.uint8))
        write(root / "train" / "labels" / f"{image}.png", label)
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_class_uniform_crops_show_their_class(sparse, workers):
    dataset = camvid(sparse, "train")
    sampler = ClassUniformMinibatches(index_classes(dataset, workers=0), crops_per_minibatch=5, seed=0, steps=20)
    crops = TrainingCrops(dataset, TrainingTransform((10, 12), scale=(1.0, 2.0)), seed=0)
    loader = DataLoader(crops, batch_sampler=sampler, num_workers=workers, worker_init_fn=worker_init)
    for draws, minibatch in zip(sampler, loader, strict=True):
        for draw, name, label in zip(draws, minibatch["name"], minibatch["label"], strict=True):
            assert name == str(draw.image) and (label == draw.class_id).any()


def test_an_image_that_is_drawn_again_is_cropped_anew(camvid_folders):
    crops = crops_of(camvid_folders)
    first, second = (crops[Draw(epoch=0, image=3, place=place, class_id=1, pixel=(5, 5))] for place in (0, 7))
    assert not same(first, second)
    assert same(first, crops[Draw(epoch=0, image=3, place=0, class_id=1, pixel=(5, 5))])


def test_without_pixel_and_place_a_draw_is_its_epoch_and_image(camvid_folders):
    assert same(crops_of(camvid_folders)[2, 3], crops_of(camvid_folders)[Draw(epoch=2, image=3)])
