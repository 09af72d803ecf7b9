"""The training schemas by task."""

from engine.schema.classification import ClassificationRun
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun

RUNS: dict[str, type[TrainingRun]] = {run.task: run for run in (SegmentationRun, ClassificationRun)}
