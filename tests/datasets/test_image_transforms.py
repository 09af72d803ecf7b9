from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from datasets import PaddedCrop, fixed_crops, random_crops
from datasets.image_transforms import lighting, seeded
from tests.datasets.classification_trees import encoded, photograph


def as_jpeg(seed: int, size: tuple[int, int]) -> tuple[torch.Tensor, Image.Image]:
    """A decoded JPEG as tensor and as Pillow's image."""
    image = Image.open(BytesIO(encoded(photograph(seed, size), quality=95))).convert("RGB")
    return F.pil_to_tensor(image), image


def difference(ours: torch.Tensor, reference: Image.Image) -> int:
    """The largest difference in levels."""
    return int((ours.int() - F.pil_to_tensor(reference).int()).abs().max())


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (120, 90), (1100, 821)])
@pytest.mark.parametrize("resize, crop", [(256, 224), (366, 320), (64, 64)])
def test_centre_and_ten_crops_equal_torchvision_s_on_pillow_images(size, resize, crop):
    pixels, image = as_jpeg(2, size)
    short = transforms.Resize(resize)(image)
    assert difference(fixed_crops(resize, crop)(pixels), transforms.CenterCrop(crop)(short)) <= 1
    ten, references = fixed_crops(resize, crop, ten=True)(pixels), transforms.TenCrop(crop)(short)
    assert ten.shape == (10, 3, crop, crop)
    assert all(difference(ours, reference) <= 1 for ours, reference in zip(ten, references, strict=True))


@pytest.mark.parametrize("resize, first", [(None, "RandomResizedCrop"), (256, "Resize RandomCrop")])
def test_training_crops_are_torchvision_s_and_depend_on_their_seed_alone(resize, first):
    transform, pixels = random_crops(resize=resize), as_jpeg(4, (300, 400))[0]
    names = [getattr(step, "__name__", type(step).__name__) for step in transform.transforms]
    assert names == [*first.split(), "RandomHorizontalFlip", "ColorJitter", "lighting"]
    assert transform.transforms[-2].brightness == (0.6, 1.4) and transform.transforms[-2].hue is None
    before = torch.get_rng_state()
    crops = [seeded(transform, pixels, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(*crops[:2]) and not torch.equal(*crops[1:])
    assert crops[0].shape == (3, 224, 224) and crops[0].dtype == torch.uint8
    plain, never = (
        seeded(v2.Compose(random_crops(resize=resize, flip=flip).transforms[:-2]), pixels, 0) for flip in (0.5, 0)
    )
    assert torch.equal(plain, never) or torch.equal(plain, never.flip(2))  # colours come last


def test_lighting_adds_alexnets_shift(monkeypatch):
    """Each principal colour is added as often as a normal number and its eigenvalue say (AlexNet, section 4.1)."""
    grey = torch.full((3, 1, 1), 128, dtype=torch.uint8)
    values = np.array([0.2175, 0.0188, 0.0045])
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    for number in range(3):
        drawn = 5 * np.eye(3)[number] / values
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda count, drawn=drawn: torch.tensor(drawn).float())
            shift = lighting(grey)[:, 0, 0].double().numpy() - 128
        assert np.abs(shift - 255 * 0.1 * 5 * vectors[:, number]).max() < 0.51  # rounded
    torch.manual_seed(0)
    for value in (0, 255):  # all pixels are shifted alike, and cut off
        extreme = lighting(torch.full((3, 2, 2), value, dtype=torch.uint8), 1e4)
        assert {*extreme.ravel().tolist()} <= {0, 255} and (extreme == extreme[:, :1, :1]).all()


@pytest.mark.parametrize("padding", [0, 2, 4])
def test_a_minibatch_of_padded_crops_is_what_torchvision_makes_one_by_one(padding):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32), dtype=np.uint8)
    transform = PaddedCrop(32, padding, fill=(125.4, 123, 113.6))
    corners, mirrored = transform.draw((32, 32), 50, np.random.default_rng(1))
    crops = transform.minibatch(pixels, corners, mirrored)
    assert crops.dtype == np.uint8 and crops.flags.c_contiguous
    for number in range(50):
        padded = v2.functional.pad(torch.from_numpy(pixels[number]), padding, [125, 123, 114])
        expected = F.crop(padded, *corners[number].tolist(), 32, 32)
        assert np.array_equal(crops[number], F.hflip(expected) if mirrored[number] else expected)


def test_padded_crops_are_drawn_everywhere_and_mirrored_as_often_as_asked():
    corners, mirrored = PaddedCrop(32, 4, flip=0.25).draw((32, 32), 20000, np.random.default_rng(0))
    counts = np.bincount(corners[:, 0] * 9 + corners[:, 1], minlength=81)
    assert counts.min() > 170 and counts.max() < 330 and 4700 < mirrored.sum() < 5300  # 247 each


def test_a_crop_larger_than_the_padded_images_is_named():
    with pytest.raises(ValueError, match="size=32 is larger than .* 30x28 pixels"):
        PaddedCrop(32, 1).draw((28, 30), 1, rng=None)
