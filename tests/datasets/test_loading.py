import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from datasets import (
    ShuffledMinibatches,
    TrainingCrops,
    TrainingTransform,
    WholeImages,
    camvid,
    cityscapes,
    worker_init,
)


def crops_of(root, seed: int = 0) -> TrainingCrops:
    return TrainingCrops(camvid(root, "train"), TrainingTransform((16, 20)), seed=seed)


def minibatches(root, workers: int, start_step: int = 0) -> list[dict]:
    sampler = ShuffledMinibatches(images=6, crops_per_minibatch=2, seed=0, steps=7, start_step=start_step)
    loader = DataLoader(crops_of(root), batch_sampler=sampler, num_workers=workers, worker_init_fn=worker_init)
    return list(loader)


def same(a: dict, b: dict) -> bool:
    return torch.equal(a["image"], b["image"]) and torch.equal(a["label"], b["label"]) and a["name"] == b["name"]


def test_same_crops_whatever_the_workers_and_after_resuming(camvid_folders):
    alone, two = minibatches(camvid_folders, workers=0), minibatches(camvid_folders, workers=2)
    assert len(alone) == 7 and all(same(a, b) for a, b in zip(alone, two, strict=True))
    resumed = minibatches(camvid_folders, workers=2, start_step=4)
    assert all(same(a, b) for a, b in zip(alone[4:], resumed, strict=True))


def test_crop_depends_on_seed_epoch_and_index(camvid_folders):
    crops, other_seed = crops_of(camvid_folders, seed=0), crops_of(camvid_folders, seed=1)
    assert same(crops[0, 3], crops[0, 3])
    assert not same(crops[0, 3], crops[1, 3])
    assert not same(crops[0, 3], other_seed[0, 3])


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
    assert (item["name"], item["index"]) == ("0001TP_000001", 1)


def test_whole_images_without_labels(cityscapes_root):
    items = list(DataLoader(WholeImages(cityscapes(cityscapes_root, "test")), batch_size=1))
    assert len(items) == 2 and all("label" not in item for item in items)


def test_training_on_a_split_without_labels_says_so(cityscapes_root):
    crops = TrainingCrops(cityscapes(cityscapes_root, "test"), TrainingTransform((8, 8)), seed=0)
    with pytest.raises(ValueError, match="no labels in split 'test'"):
        crops[0, 0]
