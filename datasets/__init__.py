"""Datasets, one file each. Segmentation samples are (image, label, name); classification has an image and its class.

Without this file, Python would import an installed package called `datasets` instead.
"""

from datasets.camvid import camvid
from datasets.cifar import cifar10, cifar100
from datasets.cityscapes import cityscapes
from datasets.class_index import ClassIndex, index_classes
from datasets.class_table import IGNORED, ClassTable
from datasets.classification import ClassificationDataset
from datasets.coco_stuff import coco_stuff
from datasets.folder import folder
from datasets.image_transforms import PaddedCrop, colour_jitter, fixed_crops, random_crops
from datasets.imagenet import image_folder, imagenet
from datasets.items import Draw, ImagesInFiles, ImagesInMemory, TrainingCrops, WholeImages, collated
from datasets.samplers import ClassUniformMinibatches, ShuffledMinibatches, minibatches_per_epoch
from datasets.segmentation import SegmentationDataset
from datasets.shapes import shapes
from datasets.synthetic import synthetic
from datasets.transforms import TrainingTransform
from datasets.verify import inspect, shared_images, verify
from datasets.vistas import vistas
from datasets.workers import Workers, reading_errors, worker_init
