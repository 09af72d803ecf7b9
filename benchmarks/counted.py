"""Tables of docs/results/memory_plan.md, estimated when `benchmarks.documents` writes them.

They show what each strategy of the paper's Figure 2 saves in whole networks of the release, and what checkpointed
blocks save. Networks run on fake tensors: little time and memory.
"""

from collections.abc import Callable
from functools import partial
from itertools import starmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import operations_of
from engine.assemble.contracts import builder
from engine.schema.keys import CHOICES
from keepless.made_tensors import MadeTensors
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode
from models.bodies import Body, densenet264, resnet101, resnext101, wider_resnet38_a2
from models.heads import DeepLabV3
from models.recomputation import RECOMPUTE, choose_recomputation
from models.segmentation import SegmentationNetwork, upsampled
from scripts.reports.markdown import table

TITLES = {
    "std": "standard",
    "checkpoint": "checkpointing",
    "checkpoint_xhat": "checkpointing (proposed)",
    "inplace_1": "in-place ABN I",
    "inplace": "in-place ABN II",
}
BODIES: dict[str, Callable[..., Body]] = {
    "ResNeXt-101": resnext101,
    "WideResNet-38": wider_resnet38_a2,
    "DenseNet-264": densenet264,
    "ResNet-101": resnet101,
}
CROPS, SIDE = 2, 512
PIXELS = CROPS * SIDE**2


def _network(body: str, norm: str, recompute: str = "none") -> SegmentationNetwork:
    """A body at output stride 8 with a DeepLabV3 head, for 19 classes."""
    norm_act = builder("norm", CHOICES["norm"][norm]())
    features = BODIES[body](norm_act, output_stride=8)
    network = SegmentationNetwork(features, DeepLabV3(features.out_channels, norm_act=norm_act), 19)
    choose_recomputation(network, features, recompute)
    return network


def _loss(network: nn.Module) -> Tensor:
    """The loss on upsampled logits of square images, as in the paper."""
    images = torch.zeros(CROPS, 3, SIDE, SIDE)
    labels = torch.zeros(CROPS, SIDE, SIDE, dtype=torch.long)
    return F.cross_entropy(upsampled(network(images).main.logits, labels.shape[1:], None), labels)


def bytes_per_pixel(norm: str, body: str) -> int:
    """Bytes per input pixel that a whole network saves for the backward pass in float32, images included."""
    with FakeTensorMode():
        network = _network(body, norm)
        return round(kept_bytes(network, partial(_loss, network)) / PIXELS)


def cost(norm: str, recompute: str) -> tuple[int, int, int]:
    """Of a ResNeXt-101: bytes per input pixel after the forward pass and at the peak, and operations of convolutions.

    Without parameters; the peak includes their gradients.
    """
    with FakeTensorMode():
        network = _network("ResNeXt-101", norm, recompute)
        with MadeTensors() as made_tensors:
            loss = _loss(network)
            kept = made_tensors.bytes
            loss.backward()
        network.zero_grad()
        operations = operations_of(lambda: _loss(network).backward())  # separately, because counting keeps tensors
    return round(kept / PIXELS), round(made_tensors.peak / PIXELS), operations


def bodies_table() -> str:
    by_body = [{norm: bytes_per_pixel(norm, body) for norm in TITLES} for body in BODIES]
    rows = []
    for norm, title in TITLES.items():
        rows.append([title, norm, *(_relative(bytes_by_norm[norm], bytes_by_norm["std"]) for bytes_by_norm in by_body)])
    return table(["strategy", "`norm=`", *BODIES], rows, left=2 + len(BODIES))


def recomputation_table() -> str:
    """The cost of a ResNeXt-101 with every choice, for two norms."""
    rows = []
    for norm in ("std", "inplace"):
        costs = {recompute: cost(norm, recompute) for recompute in RECOMPUTE}
        for name, cost_of_choice in costs.items():
            *memory, operations = zip(cost_of_choice, costs["none"], strict=True)
            rows.append([norm, name, *starmap(_relative, memory), f"{operations[0] / operations[1]:.2f}"])
    return table(["`norm=`", "`trainer.recompute=`", "saved", "peak", "operations"], rows, left=2)


def _relative(value: int, stored: int) -> str:
    if value == stored:
        return f"{value:,}"
    return f"{value:,} ({stored / value:.2f}x less)" if value < stored else f"{value:,} ({value / stored:.2f}x more)"
