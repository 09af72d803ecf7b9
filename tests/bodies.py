"""Narrow networks for tests, and weights as after a training."""

from functools import partial

import torch
from torch import nn

from keepless import ABN, InPlaceABN
from keepless.saved import saved_for_backward
from models.blocks import NormAct
from models.bodies import RevNet, densenet264, resnet34, resnet50, resnext101, wider_resnet38, wider_resnet38_a2
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork

small_resnet = partial(resnet50, structure=(1, 2, 2, 1), base_channels=(4, 4, 8), stem_channels=4)
small_resnet_basic = partial(resnet34, structure=(1, 2, 1, 1), base_channels=(8, 8), stem_channels=8)
small_resnext = partial(resnext101, structure=(1, 2, 2, 1), groups=2, base_channels=(4, 4, 8), stem_channels=4)
small_revnet = partial(RevNet, structure=(2, 2, 1), channels=((8, 8), (12, 12), (16, 16)), stem_channels=8)
_BOTTLENECKS = [(c, c, 4 * c) for c in (4, 8, 12, 16)]
small_densenet = partial(densenet264, structure=(2, 1, 3, 2), growth=4, stem_channels=8)
_WIDTHS = ((4, 4), (8, 8), (12, 12), (8, 10), (6, 8, 12), (6, 8, 16))
_WIDER = dict(structure=(1, 1, 2, 1, 1, 1), channels=_WIDTHS, stem_channels=4)
small_wider = partial(wider_resnet38, **_WIDER)
small_wider_a2 = partial(wider_resnet38_a2, **_WIDER)

SMALL_BODIES = {
    "resnet": small_resnet,
    "resnet-basic": small_resnet_basic,
    "resnet-cifar": partial(small_resnet_basic, stem="cifar", structure=(1, 2, 1)),
    "resnext": small_resnext,
    "resnext-7x7": partial(small_resnext, stem="7x7"),
    "resnext-cifar": partial(small_resnext, stem="cifar", structure=(1, 2, 1)),
    "densenet": small_densenet,
    "preact-resnet": partial(small_revnet, reversible=False),
    "revnet": small_revnet,
    "revnet-7x7": partial(small_revnet, stem="7x7", structure=(1, 1, 2, 1), channels=_BOTTLENECKS),
    "wider": small_wider,
    "wider-a2": small_wider_a2,
}


def small_segmentation(norm_act: NormAct = InPlaceABN, classes: int = 4) -> SegmentationNetwork:
    """A ResNeXt of output stride 8 with a narrow head."""
    body = small_resnext(norm_act, output_stride=8, structure=(1, 1, 1, 1))
    head = DeepLabV3(body.out_channels, hidden_channels=4, out_channels=6, dilations=(2, 3, 4), norm_act=norm_act)
    return SegmentationNetwork(body, head, classes)


def parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def kept_maps(network: nn.Module, x: torch.Tensor) -> dict[int, int]:
    """Bytes of each storage of (N, C, H, W) tensors, without parameters, that a forward pass keeps for the backward."""
    _, saved = saved_for_backward(lambda: network(x))
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    storages = [tensor.untyped_storage() for tensor in saved if tensor.dim() == 4]
    return {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in parameters}


def trained(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give the norms random statistics, weights (some negative) and biases, as if the network were trained.

    It is in float64 and in eval mode afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    ranges = {"weight": (0.5, 1.5), "bias": (-0.5, 0.5), "running_mean": (-0.5, 0.5), "running_var": (0.5, 2.0)}
    for module in network.modules():
        if isinstance(module, (ABN, nn.modules.batchnorm._BatchNorm)):
            for name, ends in ranges.items():
                if (values := getattr(module, name)) is not None:
                    values.data.uniform_(*ends, generator=generator)
            if module.weight is not None:
                module.weight.data *= torch.randint(0, 2, module.weight.shape, generator=generator) * 2 - 1
    return network
