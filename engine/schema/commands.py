"""The commands with the most keys, and words of other tools for some of them."""

from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun

COMMANDS = {
    "train_seg.py": SegmentationRun,
    "train_imagenet.py": ClassificationRun,
    "eval.py": Evaluation,
    "scripts.predict": Prediction,
}
RUNS: dict[str, type[TrainingRun]] = {run.task: run for run in (SegmentationRun, ClassificationRun)}
# Words that differ only a little from our keys are found without a table.
SYNONYMS = {
    **dict.fromkeys(("backbone", "model"), ("body",)),
    **dict.fromkeys(("checkpoint", "ckpt", "pretrained"), ("checkpoint", "init.weights")),
    **dict.fromkeys(("out", "output", "output_dir"), ("output", "run_dir")),
    "batch_size": ("data.crops_per_minibatch",),
    "dataset": ("data",),
    "learning_rate": ("optim.lr",),
}
