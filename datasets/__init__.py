"""Datasets: one file each, all giving (image, label, name). With this file our package wins over an installed one."""

from datasets.camvid import camvid
from datasets.cityscapes import cityscapes
from datasets.class_index import ClassIndex, index_classes
from datasets.class_table import ClassTable
from datasets.coco_stuff import coco_stuff
from datasets.loading import Draw, TrainingCrops, WholeImages, Workers, worker_failures, worker_init
from datasets.samplers import ClassUniformMinibatches, ShuffledMinibatches, evaluation_shard, minibatches_per_epoch
from datasets.segmentation import INSTANCES_PER_CLASS, Sample, SegmentationDataset
from datasets.synthetic import synthetic
from datasets.transforms import ColourJitter, TrainingTransform
from datasets.verify import Inspection, inspect, verify
from datasets.vistas import vistas

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
    "worker_failures",
    "worker_init",
]
