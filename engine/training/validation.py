"""Evaluate the network of a run, when scheduled and at its end."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import ClassificationDataset, SegmentationDataset
from engine.classification import accuracy as classification
from engine.process.stopping import UntilStopped
from engine.records.evaluated import Evaluated
from engine.schema.classification import ClassificationRun
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.inference import Views
from engine.segmentation.pictures import PictureCollector
from engine.training.run import Run
from keepless import Extreme, layer_health


def segment_in_run(run: Run[SegmentationRun, SegmentationDataset], loader: DataLoader) -> Evaluated:
    """Evaluate the current network of a run; measure its norms on two crops of the first image.

    Args:
        loader: this rank's share of the images.

    Raises:
        MemoryError: the device does not have enough memory.
        Preempted: the run was asked to stop.
    """
    data, trainer, world, learner = run.config.data, run.config.trainer, run.world, run.learner
    collector = PictureCollector(run.val_set, trainer.pictures)
    evaluated = segmentation.evaluate_split(
        learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, world),
        views=Views(data.base_size, data.antialias),
        world=world,
        progress=run.metrics.progress,
        on_prediction=collector,
    )
    shown = {
        f"val_pictures/{name}": picture
        for share in world.gather(collector.pictures())
        for name, picture in share.items()
    }
    crops = segmentation.corner_crops(loader.dataset[0]["image"], *data.crop())  # the same at every evaluation
    return replace(evaluated, pictures=shown, layers=_health(run, crops))


def classify_in_run(run: Run[ClassificationRun, ClassificationDataset], loader: DataLoader) -> Evaluated:
    """Like `segment_in_run`; norms are measured on two images."""
    world, learner = run.world, run.learner
    evaluated = classification.evaluate_split(
        learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, world),
        world=world,
        progress=run.metrics.progress,
    )
    images = torch.stack([loader.dataset[number]["image"] for number in (0, min(1, evaluated.images - 1))])
    return replace(evaluated, layers=_health(run, images))


def _health(run: Run, images: Tensor) -> dict[str, Extreme]:
    """`layer_health` of the trained network, on rank 0 only."""
    network = run.learner.network
    return layer_health(network, images, forward=run.learner.forward.through(network)) if run.world.first else {}
