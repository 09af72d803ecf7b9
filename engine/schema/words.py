"""What people give to a command that has no such key: keys of other commands, and words of other tools."""

from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.segmentation import SegmentationRun

COMMANDS = {
    "train_seg.py": SegmentationRun,
    "train_imagenet.py": ClassificationRun,
    "eval.py": Evaluation,
    "scripts.predict": Prediction,
}
# The first key that the command has counts. Words that only differ a little from our keys are found without a table.
WORDS = {
    **dict.fromkeys(("amp", "bf16", "fp16"), ("trainer.precision=bfloat16", "precision=bfloat16")),
    **dict.fromkeys(("arch", "backbone", "model", "network"), ("body",)),
    **dict.fromkeys(("batch", "batch_size", "train_batch_size"), ("data.crops_per_minibatch",)),
    **dict.fromkeys(("checkpoint", "ckpt", "load_from"), ("checkpoint", "init.weights")),
    **dict.fromkeys(("data_dir", "data_path", "path"), ("data.root", "input")),
    **dict.fromkeys(("image_size", "img_size", "input_size", "size"), ("data.crop_size", "data.base_size")),
    **dict.fromkeys(("iterations", "iters", "max_iters"), ("trainer.steps",)),
    **dict.fromkeys(("learning_rate", "base_lr"), ("optim.lr",)),
    **dict.fromkeys(("logdir", "out", "output", "output_dir", "save_dir", "work_dir"), ("output", "run_dir")),
    "dataset": ("data",),
    "pretrained": ("init.weights=FILE",),
    "scheduler": ("lr_schedule",),
    "wd": ("optim.weight_decay",),
}
FOLDER = "data.root"  # where a folder belongs that is given as the choice of `data`
# The first of these that the command has is where a file belongs that is given without a key.
OF_TRAINED = ("checkpoint", "input", "init.weights")
OF_OTHERS = ("input", "runs", "data.root")
