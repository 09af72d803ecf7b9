"""Drawn discs, squares and crosses, the keys of a run that classifies them, and its evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.data import DataLoader, Dataset

from engine.console import tracked
from engine.evaluated import Evaluated
from engine.prefetching import prefetched
from engine.run import Run
from engine.schema.data import Data
from engine.schema.keys import group
from engine.schema.training import TrainingRun
from engine.stopping import UntilStopped


@dataclass
class ShapesRun(TrainingRun):
    task: ClassVar[str] = "shapes"
    score: ClassVar[str] = "top1"
    score_label: ClassVar[str] = "top-1"
    head_modules: ClassVar[tuple[str, ...]] = ("1.classifier",)

    data: Data = group({"shapes": Data})


class Shapes(Dataset):
    """Images of one split, uint8 (3, size, size), drawn from their number; training keys are (epoch, number)."""

    name, classes, palette = "shapes", ("disc", "square", "cross"), None

    def __init__(self, split: str, size: int, images: int):
        self.split, self.size, self.images = split, size, images

    def __len__(self) -> int:
        return self.images

    def names_and_sizes(self) -> tuple[str, str]:
        return f"{self.images} images", f"{self.size} pixels"

    def __getitem__(self, key: int | tuple[int, int]) -> dict:
        number = key[1] if isinstance(key, tuple) else key
        generator = torch.Generator().manual_seed(2 * number + (self.split == "val"))
        label = number % 3
        x, y = (torch.arange(self.size) - self.size // 2 for _ in range(2))
        x, y, radius = x[None], y[:, None], self.size // 4
        inside = (x**2 + y**2 <= radius**2, x.abs().maximum(y.abs()) <= radius, (x * y).abs() <= radius)[label]
        noise = torch.randint(0, 64, (3, self.size, self.size), generator=generator)
        return {
            "image": (noise + 128 * inside).to(torch.uint8),
            "label": label,
            "name": f"{self.split} {number}",
            "skipped": "",
        }


def shapes(config: Data) -> tuple[Shapes, Shapes]:
    return Shapes(config.train_split, config.crop_size, 36), Shapes(config.val_split, config.crop_size, 9)


def verify(dataset: Shapes, progress: Callable[[int, int], None]) -> None:
    """Drawn images need no check."""


def evaluation_of(run: Run[ShapesRun, Shapes], loader: DataLoader) -> Callable[[], Evaluated]:
    @torch.inference_mode()
    def evaluate() -> Evaluated:
        forward = run.learner.evaluated
        forward.network.eval()
        counts = torch.zeros(2, dtype=torch.int64, device=run.world.device)  # right, all
        loaded = tracked(run.metrics.progress, UntilStopped(loader, run.stop, run.world), "evaluating")
        for minibatch in prefetched(loaded, run.world.device):
            right = forward(minibatch["image"]).argmax(dim=1) == minibatch["label"]
            counts[0] += right.sum()
            counts[1] += len(right)
        right, images = run.world.sum_(counts).tolist()  # the only wait for the device
        top1 = right / images
        return Evaluated({"top1": top1}, f"top-1 {top1:.4f}", images, curves={"val/top1": top1})

    return evaluate
