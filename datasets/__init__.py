"""Datasets, one file each; every sample is (image, label, name).

Without this file, Python would import an installed package called `datasets` instead.
"""

from datasets.camvid import camvid
from datasets.cityscapes import cityscapes
from datasets.class_index import ClassIndex, index_classes
from datasets.class_table import ClassTable
from datasets.coco_stuff import coco_stuff
from datasets.colour_jitter import ColourJitter
from datasets.loading import Draw, TrainingCrops, WholeImages
from datasets.samplers import ClassUniformMinibatches, ShuffledMinibatches, evaluation_shard, minibatches_per_epoch
from datasets.segmentation import INSTANCES_PER_CLASS, Sample, SegmentationDataset
from datasets.synthetic import synthetic
from datasets.transforms import TrainingTransform
from datasets.verify import Inspection, inspect, verify
from datasets.vistas import vistas
from datasets.workers import Workers, reading_errors, worker_init

__all__ = [
    "ClassIndex",
    "ClassTable",
    "ClassUniformMinibatches",
    "ColourJitter",
    "Draw",
    "INSTANCES_PER_CLASS",
    "Inspection",
    "Sample",
    "SegmentationDataset",
    "ShuffledMinibatches",
    "TrainingCrops",
    "TrainingTransform",
    "WholeImages",
    "Workers",
    "camvid",
    "cityscapes",
    "index_classes",
    "coco_stuff",
    "evaluation_shard",
    "inspect",
    "minibatches_per_epoch",
    "synthetic",
    "verify",
    "vistas",
    "reading_errors",
    "worker_init",
]
