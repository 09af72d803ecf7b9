"""The training schemas by task, and other tools' names for some keys."""

from engine.schema.classification import ClassificationRun
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun

RUNS: dict[str, type[TrainingRun]] = {run.task: run for run in (SegmentationRun, ClassificationRun)}
# Names that differ only a little from our keys need no entry.
SYNONYMS = {
    **dict.fromkeys(("backbone", "model"), ("body",)),
    **dict.fromkeys(("checkpoint", "ckpt", "pretrained"), ("checkpoint", "init.weights")),
    **dict.fromkeys(("out", "output", "output_dir"), ("output", "run_dir")),
    "batch_size": ("data.crops_per_minibatch",),
    "dataset": ("data",),
    "learning_rate": ("optim.lr",),
}
