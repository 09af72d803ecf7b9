"""Released files of the in-place ABN authors -> the configuration and content of a checkpoint."""

from collections.abc import Mapping

from torch import Tensor

from datasets.class_table import distinct_colours
from engine.assemble.tasks import network_of
from engine.configuration.command_line import checked, register
from engine.schema.classification import ClassificationRun
from engine.schema.keys import CHOICES
from engine.schema.segmentation import SegmentationRun
from models.checkpoints.loading import load_by_name
from models.checkpoints.recognition import Architecture, architecture_of, body_of
from models.checkpoints.released import ReleasedWeights

VISTAS_CLASSES = 65
VISTAS_POOLING = [84, 84]  # feature cells: the release's test crops, 672 pixels


def of_released(file: ReleasedWeights, name: str) -> tuple[SegmentationRun | ClassificationRun, dict, Architecture]:
    """The network of a released file: its configuration, the other parts of its checkpoint, its architecture.

    The checkpoint is of step 0, and its classes are numbers, because the file does not name them.
    ValueError, naming the file `name`: it has no classifier, or is not a network of the release.
    """
    tensors = file.converted()
    architecture = architecture_of(body_of(tensors))
    segments = "cls.weight" in tensors
    count = len(tensors["cls.weight"]) if segments else architecture.classes
    if segments and count != VISTAS_CLASSES:
        raise ValueError(
            f"{name} segments {count} classes: expected the {VISTAS_CLASSES} of Vistas, because no other "
            f"segmentation network was released; start a training from it with init.weights and init.format=released"
        )
    if not count:
        raise ValueError(f"{name} has no classifier: load it with init.weights and init.format=released")
    norm = "std" if file.scale == "raw" else "inplace"
    config: SegmentationRun | ClassificationRun
    if segments:
        config = _segmentation(tensors, architecture, norm)
    else:
        config = _classification(architecture, norm)
    network = network_of(config, count)
    load_by_name(network, tensors, source=name, name=name, advice="It is not a network of the release")
    state = {
        "task": config.task,
        "step": 0,
        "classes": [str(number) for number in range(count)],
        "network": network.state_dict(),
        "unnamed_classes": True,
        **({"palette": list(distinct_colours(count))} if segments else {}),
    }
    return config, state, architecture


def _segmentation(tensors: Mapping[str, Tensor], architecture: Architecture, norm: str) -> SegmentationRun:
    """The configuration of a segmentation network with these weights."""
    register(SegmentationRun.entry, SegmentationRun)
    config = checked(SegmentationRun.entry, "data=vistas", "head=deeplabv3", "optim=sgd", f"norm={norm}")
    config.body = CHOICES["body"][architecture.kind](**architecture.options, output_stride=8)
    config.head.pooling_size = VISTAS_POOLING
    maps, reduced = (tensors.get(f"head.{conv}.weight") for conv in ("map_convs.0", "red_conv"))
    if maps is not None and reduced is not None:
        config.head.hidden_channels = len(maps)
        config.head.out_channels = len(reduced)
    return config


def _classification(architecture: Architecture, norm: str) -> ClassificationRun:
    """The configuration of a classification network."""
    register(ClassificationRun.entry, ClassificationRun)
    config = checked(ClassificationRun.entry, "data=imagenet", "optim=sgd", f"norm={norm}")
    options = architecture.options | {"output_stride": 32}
    if architecture.kind == "wider_resnet":
        options |= {"downsampling": "pool", "dropout": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]}
    config.body = CHOICES["body"][architecture.kind](**options)
    return config
