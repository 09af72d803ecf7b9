"""The items of a DataLoader: crops that depend on seed, epoch and image alone, and whole images for evaluation."""

import itertools

import numpy as np
import pytest
import torch

from datasets import SegmentationDataset, TrainingTransform, camvid, cifar10, imagenet
from datasets.augmentations import Augmentations
from datasets.classification import mean_image
from datasets.image_transforms import PaddedCrop, fixed_crops, random_crops
from datasets.items import Draw, ImagesInFiles, ImagesInMemory, TrainingCrops, collated
from datasets.samplers import ShuffledMinibatches
from datasets.stream import Draws
from datasets.workers import Loader, reading_errors
from tests import trees
from tests.datasets import classification_trees

DATASETS = {
    "segmentation": lambda folder: camvid(trees.camvid_folders(folder), "train"),
    "files": lambda folder: imagenet(classification_trees.imagenet(folder), "train"),
    "memory": lambda folder: cifar10(classification_trees.cifar_zip(folder / "cifar.zip"), "train"),
}


@pytest.fixture(params=DATASETS)
def dataset(request, tmp_path):
    return DATASETS[request.param](tmp_path / "data")


@pytest.fixture
def files(tmp_path):
    return DATASETS["files"](tmp_path / "imagenet")


@pytest.fixture
def memory(tmp_path):
    return DATASETS["memory"](tmp_path / "cifar")


def crops_of(dataset, seed: int = 0, **options) -> TrainingCrops | ImagesInFiles | ImagesInMemory:
    if isinstance(dataset, SegmentationDataset):
        return TrainingCrops(dataset, TrainingTransform((16, 20)), seed, **options)
    if dataset.pixels is None:
        return ImagesInFiles(dataset, random_crops(24), seed, **options)
    return ImagesInMemory(dataset, PaddedCrop(), seed, **options)


def minibatches(crops, workers: int, start_step: int = 0, size: int = 3) -> list[dict]:
    """Those of two epochs."""
    sampler = ShuffledMinibatches(len(crops), size, seed=0, steps=2 * len(crops) // size, start_step=start_step)
    return list(Loader(crops, workers, batch_sampler=sampler, collate_fn=collated))


def augmented(dataset, seed: int = 0, **augmentations) -> TrainingCrops | ImagesInFiles | ImagesInMemory:
    return crops_of(dataset, augmentations=Augmentations(augmentations, seed))


def darker(image, label, rng):
    return (image * rng.uniform(0, 0.5)).astype(np.uint8), label


def swapped(image, label, rng):
    return image[:, ::-1], None if label is None else label[:, ::-1]


def same(a: dict, b: dict) -> bool:
    labels = (torch.as_tensor(item["label"]) for item in (a, b))
    return torch.equal(a["image"], b["image"]) and torch.equal(*labels) and a["name"] == b["name"]


def test_minibatches_do_not_depend_on_workers_or_where_a_run_starts(dataset):
    alone = minibatches(crops_of(dataset), workers=0)
    assert len(alone) == 2 * len(dataset) // 3  # two epochs
    for workers, start_step in ((2, 0), (2, 3), (0, len(alone) - 1)):
        resumed = minibatches(crops_of(dataset), workers, start_step)
        assert all(same(a, b) for a, b in zip(alone[start_step:], resumed, strict=True))
    assert not same(alone[0], minibatches(crops_of(dataset, seed=1), 0)[0])


def test_a_crop_depends_on_seed_epoch_and_image(dataset):
    crops = [crops_of(dataset, seed) for seed in (0, 1)]
    keys = list(itertools.product((0, 1, 2), (0, 1, 2, 3)))
    different = {of_seed[key]["image"].numpy().tobytes() for of_seed in crops for key in keys}
    assert len(different) == 2 * len(keys)
    assert same(crops[0][(1, 3)], crops_of(dataset, 0)[(1, 3)])


def test_an_image_that_is_drawn_again_is_cropped_anew(camvid_folders):
    """A draw without pixel and place is its epoch and image. Crops are uint8, (3, H, W)."""
    crops = crops_of(camvid(camvid_folders, "train"))
    item = crops[2, 3]
    assert same(item, crops[Draw(epoch=2, image=3)]) and item["name"] == "0001TP_000003"
    assert item["image"].shape == (3, 16, 20) and item["label"].shape == (16, 20)
    for tensor in (item["image"], item["label"]):
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
    first, second, again = (crops[Draw(epoch=0, image=3, place=place, class_id=1, pixel=(5, 5))] for place in (0, 7, 0))
    assert same(first, again) and not same(first, second)


@pytest.mark.parametrize("base_size", [None, 17, 90])
def test_a_crop_decodes_what_it_needs_of_the_image_and_gives_what_the_whole_gives(camvid_folders, base_size):
    dataset = camvid(camvid_folders, "train")
    transform = TrainingTransform((16, 20), base_size=base_size)
    crops = TrainingCrops(dataset, transform, seed=3)
    for epoch in range(20):
        for index in range(6):
            whole, rng = dataset[index], np.random.default_rng([3, epoch, index])
            class_id = int(whole.label[5, 9])
            image, label = transform(whole.image, whole.label, rng, (5, 9), class_id)
            crop = crops[Draw(epoch, index, class_id=class_id, pixel=(5, 9))]
            assert (label == class_id).any()
            assert np.array_equal(crop["image"].permute(1, 2, 0).numpy(), image)
            assert np.array_equal(crop["label"].numpy(), label)


@pytest.mark.parametrize("dataset", ["files", "memory"], indirect=True)
def test_a_minibatch_is_its_items_in_order(dataset):
    crops, size = crops_of(dataset), 24 if dataset.pixels is None else 32
    keys = [(3, 4), (3, 0), (3, 5)]
    (minibatch,) = Loader(crops, 0, batch_sampler=[keys], collate_fn=collated)
    assert minibatch["image"].shape == (3, 3, size, size) and minibatch["image"].dtype == torch.uint8
    assert minibatch["label"].dtype == torch.int64 and minibatch["image"].is_contiguous()
    assert minibatch["label"].tolist() == [dataset.label(number) for _, number in keys]
    assert list(minibatch["name"]) == [dataset.image_name(number) for _, number in keys]
    for place, key in enumerate(keys):
        item = crops[key]
        assert item.keys() == minibatch.keys() and item["image"].is_contiguous()
        assert torch.equal(item["image"], minibatch["image"][place]) and item["label"] == minibatch["label"][place]
        assert item["name"] == minibatch["name"][place]


def test_a_mean_image_is_subtracted_before_padding(memory):
    """The float64 difference is padded with zeros, rounded once, and cropped where the image itself would be."""
    images = len(memory)
    mean = [sum(column) / images for column in memory.pixels.reshape(images, -1).T.tolist()]  # of Python's integers
    assert np.array_equal(mean_image(memory), np.reshape(mean, (3, 32, 32)))
    difference = torch.from_numpy(memory.pixels) - torch.tensor(mean, dtype=torch.float64).view(3, 32, 32)
    transform = PaddedCrop(32, 2, fill=(0, 0, 0))
    crops = ImagesInMemory(memory.minus(mean_image(memory)), transform, seed=0)
    numbers = range(0, images, 3)
    batch = crops.__getitems__([(4, number) for number in numbers])
    assert batch["image"].dtype == torch.float32 and batch["image"].is_contiguous()
    as_stored = ImagesInMemory(memory, transform, seed=0)
    corners = set()
    for crop, number in zip(batch["image"], numbers, strict=True):
        placements = [
            (top, left, mirrored)
            for top, left, mirrored in itertools.product(range(5), range(5), (False, True))
            if torch.equal(window(difference[number], top, left, mirrored).float(), crop)
        ]
        assert len(placements) == 1
        stored = as_stored[(4, number)]["image"]
        assert torch.equal(window(torch.from_numpy(memory.pixels[number]), *placements[0]), stored)
        corners.update(placements)
    assert len(corners) > 5


def window(image: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    """A crop of 32x32 pixels of an image (3, 32, 32) with two pixels of zeros around it."""
    crop = torch.nn.functional.pad(image, (2, 2, 2, 2))[:, top : top + 32, left : left + 32]
    return crop.flip(2) if mirrored else crop


def test_evaluated_images_are_minus_the_mean_image_of_another_split(memory, tmp_path):
    mean = mean_image(memory)
    test = cifar10(tmp_path / "cifar", "test")
    batch = ImagesInMemory(test.minus(mean)).__getitems__([3, 0])
    assert np.array_equal(batch["image"].numpy(), (test.pixels[[3, 0]] - mean).astype(np.float32))
    assert torch.equal(ImagesInMemory(test.minus(mean))[3]["image"], batch["image"][0])
    assert ImagesInMemory(test)[3]["image"].dtype == torch.uint8  # the split itself is as it was


def test_evaluated_images_of_files(files):
    centre, ten = (ImagesInFiles(files, fixed_crops(32, 24, ten)) for ten in (False, True))
    assert len(centre) == 6
    (batch,) = Loader(ten, 0, batch_size=6, collate_fn=collated)
    assert batch["image"].shape == (6, 10, 3, 24, 24) and batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [0, 0, 1, 1, 2, 2] and batch["name"][5] == files.image_name(5)
    for number in range(6):
        item = centre[number]
        assert item.keys() == {"image", "label", "name"} and type(item["label"]) is int
        assert torch.equal(item["image"], fixed_crops(32, 24)(torch.from_numpy(files.image(number)).movedim(2, 0)))
        assert torch.equal(item["image"], batch["image"][number, 4]) and item["image"].is_contiguous()


@pytest.mark.parametrize("scale", [(1, 1), (1.5, 1.5), (0.2, 0.2)])
def test_a_pixel_of_another_class_than_the_index_says_is_refused(scale, camvid_folders):
    """A label that was replaced: a class that it does not have must not be written into a crop."""
    label = np.full((24, 40), 3, np.uint8)
    label[7, 11] = 5
    trees.write(camvid_folders / "train/labels/0001TP_000000.png", label)
    crops = TrainingCrops(camvid(camvid_folders, "train"), TrainingTransform((16, 16), scale=scale), 0)
    for class_id, pixel in ((3, (2, 5)), (5, (7, 11))):
        assert (crops[Draw(0, 0, 0, class_id, pixel)]["label"] == class_id).any()
    for pixel in ((2, 5), (23, 39)):
        with pytest.raises(ValueError, match="label has another class than 4 there, but the class index has its pixel"):
            crops[Draw(0, 0, 0, 4, pixel)]


def test_an_error_of_a_transform_is_not_one_of_the_class_index(camvid_folders):
    def jitter(image):
        raise KeyError("hue")

    transform = TrainingTransform((16, 16), colour_jitter=jitter)
    with pytest.raises(KeyError, match="hue"):
        TrainingCrops(camvid(camvid_folders, "train"), transform, 0)[0, 0]


def test_augmentations_change_a_crop_in_order_and_draw_by_seed_epoch_and_image(dataset):
    plain, mirrored = crops_of(dataset), augmented(dataset, swapped=swapped)
    assert torch.equal(plain[0, 1]["image"].flip(-1), mirrored[0, 1]["image"])
    label = torch.as_tensor(plain[0, 1]["label"])
    assert torch.equal(label.flip(-1) if label.ndim else label, torch.as_tensor(mirrored[0, 1]["label"]))
    crops = [augmented(dataset, seed, darker=darker, swapped=swapped) for seed in (0, 0, 1)]
    assert same(crops[0][0, 1], crops[1][0, 1]) and not same(crops[0][0, 1], crops[2][0, 1])
    shares = {crops[0][epoch, 1]["image"].sum() / plain[epoch, 1]["image"].sum() for epoch in (0, 1)}
    assert len(shares) == 2 and max(shares) <= 0.5


def raising(error: BaseException):
    def augment(image, label, rng):
        raise error

    return augment


@pytest.mark.parametrize(
    "augment, problem",
    [
        (raising(KeyError("brightness")), ": KeyError: 'brightness'"),
        (lambda image, label, rng: None, ": TypeError: cannot unpack non-iterable NoneType object"),
        (lambda image, label, rng: (image / 255, label), " returned the image as float64 (24, 24, 3)"),
        (lambda image, label, rng: (image[:9], label), " returned the image as uint8 (9, 24, 3)"),
    ],
)
def test_an_augmentation_that_fails_is_named(files, augment, problem):
    with pytest.raises(ValueError) as error:
        augmented(files, mine=augment)[0, 1]
    assert str(error.value).startswith(f"augmentations=mine{problem}")


def in_place(image, label, rng):
    label[0, 0] = 200
    return image, label


@pytest.mark.parametrize("augment", [in_place, lambda image, label, rng: (image, np.full_like(label, 200))])
def test_an_augmentation_that_makes_an_id_of_no_class_is_named(camvid_folders, augment):
    """Such as an interpolated mask: a loss would refuse it without knowing where it came from."""
    dataset = camvid(camvid_folders, "train")
    expected = "augmentations=mine returned a label with the ids 200: expected classes from 0 to 10, and 255 for"
    with pytest.raises(ValueError, match=expected):
        augmented(dataset, mine=augment)[0, 1]
    ignored = augmented(dataset, mine=lambda image, label, rng: (image, np.full_like(label, 255)))
    assert (ignored[0, 1]["label"] == 255).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_augmentation_that_asks_knows_where_in_the_run_its_crop_is(dataset, workers):
    def shown(image, label, rng, step, place, epoch):
        image[0, 0] = step, place, round(100 * epoch)
        return image, label

    order = {"crops_per_minibatch": 3, "steps": 4, "start_step": 1, "rank": 0, "world_size": 1}
    sampler = ShuffledMinibatches(len(dataset), seed=0, **order)
    draws = Draws(sampler, "sampler", order, len(dataset))
    loader = Loader(augmented(dataset, mine=shown), workers, batch_sampler=draws, collate_fn=collated)
    epochs = [round(100 * step / sampler.steps_per_epoch) % 256 for step in (2, 3, 4)]
    for number, minibatch in enumerate(loader):
        marks = minibatch["image"][:, :, 0, 0].tolist()
        assert marks == [[number + 2, 3 * number + 3 + crop, epochs[number]] for crop in range(3)]


class CutMix:
    """Yun et al. (2019): a box of another crop."""

    mixes = 2

    def __call__(self, image, label, rng, further):
        (first, first_label), (second, _) = further
        assert first.shape == image.shape and first_label.shape == label.shape and (first != second).any()
        top, left = rng.integers(0, 8, 2)
        image[top : top + 8, left : left + 8] = first[top : top + 8, left : left + 8]
        label[top : top + 8, left : left + 8] = first_label[top : top + 8, left : left + 8]
        return image, label


def test_further_crops_to_mix_depend_on_seed_epoch_and_image(camvid_folders):
    dataset = camvid(camvid_folders, "train")
    plain, mixed = crops_of(dataset), augmented(dataset, mix=CutMix())
    minibatch = [(0, number) for number in range(len(dataset))]
    first, again = ([mixed[key] for key in keys] for keys in (minibatch, minibatch[::-1]))
    assert all(map(same, first, again[::-1]))
    usual = [plain[key] for key in minibatch]
    assert not any(map(same, first, usual))
    for mixed_item, usual_item in zip(first, usual, strict=True):
        changed = (mixed_item["image"] != usual_item["image"]).any(dim=0)
        assert changed.sum() <= 64 and torch.equal(mixed_item["image"][:, ~changed], usual_item["image"][:, ~changed])
    darkened, mixed_darker = augmented(dataset, darker=darker), augmented(dataset, mix=CutMix(), darker=darker)
    assert not same(darkened[0, 1], mixed_darker[0, 1]) and not same(mixed_darker[0, 1], mixed_darker[1, 1])


def test_an_augmentation_that_ends_its_process_is_named_at_once(dataset):
    """The run waited for data.timeout_seconds, and blamed the disk."""
    with pytest.raises(ValueError, match="augmentations=mine: SystemExit: 0"), reading_errors(600):
        minibatches(augmented(dataset, mine=raising(SystemExit(0))), 2)
