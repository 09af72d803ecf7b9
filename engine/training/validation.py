"""Evaluate the network of a run, when scheduled and at its end."""

from dataclasses import replace

from torch.utils.data import DataLoader

from datasets import ClassificationDataset, SegmentationDataset
from engine.assemble.tasks import added_scores
from engine.classification import accuracy as classification
from engine.process.stopping import UntilStopped
from engine.records.evaluated import Evaluated
from engine.schema.classification import ClassificationRun
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.batches import AtOnce
from engine.segmentation.pictures import PictureCollector
from engine.training.run import Run


def segment_in_run(run: Run[SegmentationRun, SegmentationDataset], loader: DataLoader, at_once: AtOnce) -> Evaluated:
    """Evaluate the current network of a run on this rank's images, and show its predictions.

    Errors: see `evaluate_split`; Preempted: the run was asked to stop.
    """
    world = run.world
    collector = PictureCollector(run.val_set, run.config.trainer.pictures)
    evaluated = segmentation.evaluate_split(
        run.learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, world),
        world=world,
        progress=run.metrics.progress,
        on_prediction=collector,
        at_once=at_once,
        added=added_scores(run.config, run.val_set),
    )
    ranks = world.gather(collector.pictures())
    pictures = {f"val_pictures/{name}": picture for shown in ranks for name, picture in shown.items()}
    return replace(evaluated, pictures=pictures)


def classify_in_run(run: Run[ClassificationRun, ClassificationDataset], loader: DataLoader) -> Evaluated:
    """Like `segment_in_run`, without pictures."""
    return classification.evaluate_split(
        run.learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, run.world),
        world=run.world,
        progress=run.metrics.progress,
        added=added_scores(run.config, run.val_set),
    )
