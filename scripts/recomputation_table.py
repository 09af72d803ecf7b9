"""The table of `trainer.recompute` in docs/memory.md, which `python -m scripts.strategy_table` prints."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from engine.planner.made_tensors import MadeTensors
from models.bodies import Body
from models.heads import DeepLabV3
from models.recomputation import RECOMPUTE, choose_recomputation
from models.segmentation import SegmentationNetwork


class Cost(NamedTuple):
    """Of a training step, in bytes per input pixel: tensors other than the parameters."""

    kept: int  # after the forward pass
    peak: int  # at any moment, with the gradients of the parameters
    operations: int  # floating-point operations of convolutions


def segmentation_network(
    build: Callable[..., Body], norm_act: Callable[[int], nn.Module], recompute: str = "none"
) -> SegmentationNetwork:
    """A body at output stride 8 with a DeepLabV3 head, for 19 classes."""
    features = build(norm_act, output_stride=8)
    network = SegmentationNetwork(features, DeepLabV3(features.out_channels, norm_act=norm_act), 19)
    choose_recomputation(network, features, recompute)
    return network


def segmentation_loss(
    build: Callable[..., Body],
    norm_act: Callable[[int], nn.Module],
    crops: int,
    crop_size: int,
    recompute: str = "none",
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A `segmentation_network`, and a function: its loss of square crops."""
    network = segmentation_network(build, norm_act, recompute)

    def loss() -> Tensor:
        images = torch.zeros(crops, 3, crop_size, crop_size)
        labels = torch.zeros(crops, crop_size, crop_size, dtype=torch.long)
        return F.cross_entropy(network(images), labels)

    return network, loss


def cost(
    build: Callable[..., Body], norm_act: Callable[[int], nn.Module], recompute: str, crop_size: int = 512
) -> Cost:
    """Cost of a step of `segmentation_loss` in float32, measured on fake tensors."""
    crops = 2
    pixels = crops * crop_size**2
    with FakeTensorMode():
        network, forward = segmentation_loss(build, norm_act, crops, crop_size, recompute)
        with MadeTensors() as made:
            loss = forward()
            kept = made.bytes
            loss.backward()
        network.zero_grad()
        with FlopCounterMode(display=False) as counter:  # by itself, because it keeps tensors
            forward().backward()
    return Cost(round(kept / pixels), round(made.peak / pixels), counter.get_total_flops())


def recomputation_table(build: Callable[..., Body], norms: Mapping[str, Callable[[int], nn.Module]]) -> str:
    """The cost of a body with every norm and choice in Markdown; `norms`: {norm: channels -> norm and activation}."""
    lines = ["| `norm=` | `trainer.recompute=` | kept | peak | operations |", "|---|---|---:|---:|---:|"]
    for norm, norm_act in norms.items():
        stored = cost(build, norm_act, "none")
        for recompute in RECOMPUTE:
            kept, peak, operations = cost(build, norm_act, recompute)
            cells = _relative(kept, stored.kept), _relative(peak, stored.peak), f"{operations / stored.operations:.2f}"
            lines.append(f"| {norm} | {recompute} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _relative(value: int, stored: int) -> str:
    if value == stored:
        return f"{value:,}"
    return f"{value:,} ({stored / value:.2f}x less)" if value < stored else f"{value:,} ({value / stored:.2f}x more)"
