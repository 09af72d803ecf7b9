"""Trained networks that predict image files, arrays or Pillow images. `engine.prediction.open_network` makes them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from datasets.reading import ALL_16, Range16, decode_image
from datasets.stored import COLOURS
from engine.classification.accuracy import class_logits
from engine.process.allocations import memory_errors, return_freed_memory
from engine.process.transfers import HostCopy
from engine.segmentation import inference
from engine.segmentation.batches import AtOnce
from models.forward import Forward
from models.private_torch import FakeTensor, assert_on_device

Picture = np.ndarray | Image.Image | str | Path
TRIMMED_EVERY = 8  # changes of image size; trimming takes a few milliseconds


class ImageFormat(NamedTuple):
    """How image files become levels, and pictures."""

    range16: Range16 = ALL_16  # of 16-bit files: see `decode_image`
    shown: Sequence[int] | None = None  # channels in pictures: see `visible`


class Predictor(nn.Module):
    """A trained network in eval mode, its normalisation and its classes.

    Attributes: `network`; `classes`, their names; `mean` and `std`, levels of 0 to 255, (1, channels, 1, 1), or with a
    mean image (1, 3, H, W); `range16` and `shown` of an `ImageFormat`; `channels` of an image.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, forward: Forward, classes: Sequence[str], image_format: ImageFormat):
        super().__init__()
        self.network = forward.network
        self.classes = tuple(classes)
        self.range16 = image_format.range16
        self.shown = image_format.shown
        self.register_buffer("mean", forward.mean, persistent=False)
        self.register_buffer("std", forward.std, persistent=False)
        self._forward = forward
        self.eval()

    @property
    def forward_pass(self) -> Forward:
        """From images to logits, on the device where the module is."""
        return replace(self._forward, mean=self.mean, std=self.std)

    @property
    def channels(self) -> int:
        return self.mean.shape[1]

    def extra_repr(self) -> str:
        weights = sum(parameter.numel() for parameter in self.parameters())
        return f"{len(self.classes)} classes, images of {self.channels} channels, {weights:,} parameters"

    def planes(self, image: Picture) -> Tensor:
        """An image, uint8 (channels, H, W)."""
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels_of(image, self.range16, self.channels), -1, 0)))

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, channels, H, W), levels of 0 to 255 in any dtype -> logits, float32, or float64 if the module is.

        ValueError: the images cannot be levels, see `check_levels`, on CUDA an assertion fails; or they have another
        number of channels than the network, if that is not three.
        """
        check_levels(images)
        if self.channels not in (COLOURS, images.shape[1]):  # one channel would be repeated
            raise ValueError(f"images of shape {(*images.shape,)}: expected (N, {self.channels}, H, W)")
        if images.is_floating_point():
            images = images.to(self.mean.dtype)
        logits = self.forward_pass(images)
        return logits if logits.dtype == torch.float64 else logits.float()


class Segmenter(Predictor):
    """Segments images: logits (N, classes, H, W).

    `palette`: uint8 (classes, 3) RGB. `label_ids`: uint8 (classes,), the ids in labels. `at_once`: the scales, windows
    and flips of each image that the network sees, and how many windows are in a pass.
    """

    def __init__(
        self,
        forward: Forward,
        classes: Sequence[str],
        image_format: ImageFormat,
        *,
        palette: Sequence[Sequence[int]],
        label_ids: Sequence[int],
        at_once: AtOnce,
    ):
        super().__init__(forward, classes, image_format)
        self.palette = np.array(palette, np.uint8)
        self.label_ids = np.array(label_ids, np.uint8)
        self.at_once = at_once
        self._last_size: tuple[int, ...] = ()
        self._changes = 0  # of the size, from one image to the next

    def predict(self, image: Picture) -> np.ndarray:
        """The class of every pixel, uint8 (H, W), as positions in `classes`. Errors: see `probabilities`."""
        return self.start_prediction(image)()

    def probabilities(self, image: Picture) -> np.ndarray:
        """The probability of every class at every pixel, float32 (classes, H, W). See `classes_by`.

        Errors: see `pixels_of`; MemoryError; FloatingPointError if a pixel has no finite score.
        """
        return self.start_prediction(image, probabilities=True)()

    def classes_by(self, probabilities: np.ndarray) -> np.ndarray:
        """The prediction, uint8 (H, W), by its probabilities: the likeliest classes, unless the head decides."""
        network: Any = self.network
        if not hasattr(getattr(network, "head", None), "decide"):
            return probabilities.argmax(axis=0).astype(np.uint8)
        with torch.inference_mode():
            scores = torch.from_numpy(probabilities)[None].to(self.mean.device)
            return network.decide(scores.log())[0].byte().cpu().numpy()

    def start_prediction(self, image: Picture, probabilities: bool = False) -> Callable[[], np.ndarray]:
        """Start `predict` or `probabilities`; the function that is returned waits for the result, in any thread."""
        images = pinned(self.planes(image), self.mean.device)[None]
        forward = self.forward_pass
        views = self.at_once.views

        def predict(part: dict, windows: int) -> tuple[Tensor, Tensor]:
            unscored = torch.zeros(2, dtype=torch.int64, device=self.mean.device)
            predictions = inference.predict(
                forward, part["image"], views, probabilities=probabilities, unscored=unscored, windows=windows
            )
            return predictions[0], unscored

        [(_, prediction)] = self.at_once.predict_parts(forward, {"image": images}, predict)
        wait_for_copy = start_copy(prediction)
        self._note_size(images.shape)

        def finish() -> np.ndarray:
            copied, unscored = wait_for_copy()
            unscored_count, pixel_count = unscored.tolist()
            forward.check_scores(unscored_count, pixel_count, "pixels")
            return copied.numpy()

        return finish

    def _note_size(self, size: tuple[int, ...]) -> None:
        """Note the size of an image. Every few changes, return the memory that was freed for other sizes."""
        if size != self._last_size:
            self._last_size = size
            self._changes += 1
            if self._changes % TRIMMED_EVERY == 0:
                return_freed_memory()


class Classifier(Predictor):
    """Classifies whole images: logits (N, classes). `view`: an image -> the crop that the network sees, or ten."""

    def __init__(
        self,
        forward: Forward,
        classes: Sequence[str],
        image_format: ImageFormat,
        *,
        view: Callable[[Tensor], Tensor],
    ):
        super().__init__(forward, classes, image_format)
        self.view = view

    def predict(self, image: Picture) -> int:
        """The class of an image, as its position in `classes`. Errors: as for `Segmenter.probabilities`."""
        return int(self.probabilities(image).argmax())

    def probabilities(self, image: Picture) -> np.ndarray:
        """The probability of every class, float32 (classes,), from the crops' mean logits."""
        return self.start_prediction(image)()

    def start_prediction(self, image: Picture) -> Callable[[], np.ndarray]:
        """Start `probabilities`; the function that is returned waits for them, in any thread."""
        crops = pinned(self.view(self.planes(image)), self.mean.device)  # (3, h, w) or (10, 3, h, w)
        forward = self.forward_pass
        with memory_errors(f"while an image was classified. {forward.memory_advice}"), torch.inference_mode():
            logits = class_logits(forward, crops[None])[0]
            wait_for_copy = start_copy((logits.softmax(dim=0), logits.max().isfinite()))

        def finish() -> np.ndarray:
            probabilities, is_finite = wait_for_copy()
            forward.check_scores(int(not is_finite), 1, "images")
            return probabilities.numpy()

        return finish


def pinned(image: Tensor, device: torch.device) -> Tensor:
    """The image in memory from which it can be copied to `device` without a wait."""
    return image.pin_memory() if device.type == "cuda" else image


def start_copy(tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Start copying tensors to the CPU; the function that is returned waits for the copies."""
    return HostCopy(tensors).wait if tensors[0].is_cuda else lambda: tensors


def check_levels(images: Tensor) -> None:
    """Refuse negative values, and fractions below 1: such images are normalised already, or scaled to 0 to 1.

    Reads one value of an image on the CPU; on another device it asserts without waiting. A compiled or exported program
    does not check.
    """
    if images.dtype == torch.uint8 or not images.numel() or images.is_meta or isinstance(images, FakeTensor):
        return
    if torch.compiler.is_compiling():
        return
    images = images.detach()
    lowest = images.amin()
    highest = images.amax()
    wrong = lowest < 0
    if images.is_floating_point():
        wrong = wrong | (highest <= 1) & (images != images.trunc()).any()
    expected = "expected levels of 0 to 255, RGB; the network normalises them itself"
    if images.device.type != "cpu":
        assert_on_device(~wrong, f"negative images, or images of 0 to 1: {expected}")
    elif wrong:
        advice = "" if lowest < 0 else "; multiply the images by 255"
        raise ValueError(f"images with values from {lowest:.3g} to {highest:.3g}: {expected}{advice}")


def pixels_of(image: Picture, range16: Range16 = ALL_16, channels: int = COLOURS) -> np.ndarray:
    """uint8 (H, W, 3) RGB of an array (H, W, 3) or (H, W), a Pillow image, or a file, rotated by its EXIF orientation.

    With other than three `channels`: uint8 (H, W, channels) of such an array or a file; of one, (H, W) too.
    ValueError: the file cannot be read, or the array or image does not have 8-bit pixels.
    """
    is_colour = channels == COLOURS
    if isinstance(image, (str, Path)):
        return decode_image(Path(image), turned=True, range16=range16, channels=channels)
    if isinstance(image, Image.Image) and is_colour and not image.mode.startswith(("I", "F")):
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    if isinstance(image, np.ndarray):
        pixels = image if image.ndim != 2 else np.repeat(image[..., None], COLOURS if is_colour else 1, axis=2)
        if pixels.dtype == np.uint8 and pixels.shape[2:] == (channels,) and pixels.size:
            return pixels
        kind = f"an array of {image.dtype} {image.shape}"
    elif isinstance(image, Image.Image):
        kind = f"a Pillow image of mode {image.mode}"
    else:
        kind = type(image).__name__
    if is_colour:
        expected = "pixels of 8 bits, as a uint8 array (H, W, 3) of RGB or (H, W) of gray, as a Pillow image, or as"
    else:
        expected = f"a uint8 array (H, W, {channels}), or"
    raise ValueError(f"got {kind}: expected {expected} the path of a file")
