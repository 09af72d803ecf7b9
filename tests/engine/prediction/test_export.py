"""Exported programs: the same logits at any size, with norms folded into convolutions."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from engine.prediction.export import exported, largest_difference
from engine.prediction.predictors import Predictor
from engine.process.forward import Forward
from keepless import ABN, CheckpointedABN, InPlaceABN
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests.bodies import SMALL_BODIES, trained

CLASSES = [str(number) for number in range(5)]


def predictor(network: nn.Module, dtype: torch.dtype = torch.float64) -> Predictor:
    """With random statistics, scales and shifts."""
    mean, std = (torch.tensor(levels)[None, :, None, None] for levels in ([120.0, 110, 100], [60.0, 61, 62]))
    forward = Forward(trained(network), mean, std, torch.contiguous_format, nullcontext)
    return Predictor(forward, CLASSES, "").to(dtype)


def norms_left(program: torch.export.ExportedProgram) -> int:
    return len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default))


class Convolutions(nn.Module):
    """Norms that can be folded, and norms that cannot."""

    def __init__(self):
        super().__init__()
        make = partial(nn.Conv2d, 4, 4, 3, padding=1)
        self.first, self.biased, self.plain, self.fixed = nn.Conv2d(3, 4, 3), make(), make(bias=False), make(bias=False)
        self.shared, self.twice, self.free = make(bias=False), make(bias=False), make(bias=False)
        self.norms = nn.ModuleList([InPlaceABN(4), CheckpointedABN(4, activation="elu"), nn.BatchNorm2d(4)])
        self.fixed_norm, self.others = InPlaceABN(4, learn_scale=False), nn.ModuleList([ABN(4) for _ in range(4)])
        self.free_norm = nn.BatchNorm2d(4, affine=False)

    def forward(self, x):
        x = self.norms[1](self.biased(self.norms[0](self.first(x))))
        x = self.fixed_norm(self.fixed(self.norms[2](self.plain(x))))
        y = self.shared(x)
        x = self.others[0](y) + self.others[1](y)  # two norms of one convolution
        x = self.others[3](self.twice(self.others[2](self.twice(x))))  # two convolutions with one weight
        return self.free_norm(self.free(x))  # no shift that could become the bias


def test_a_norm_is_folded_where_it_alone_reads_a_convolution():
    network = Convolutions()
    network.fixed_norm.weight = nn.Parameter(torch.ones(4))  # for `trained`
    network.free_norm.weight, network.free_norm.bias = (nn.Parameter(torch.ones(4)) for _ in range(2))
    made = predictor(network)
    network.fixed_norm.weight, network.free_norm.weight, network.free_norm.bias = None, None, None
    folded = exported(made)
    assert norms_left(folded) == 5
    assert largest_difference(folded.module(), made) < 1e-12
    unused = {
        name for name in folded.state_dict if "running" in name and name.split(".")[2] in "012" and "norms" in name
    }
    assert not unused and "network.norms.0.bias" in folded.state_dict and not folded.example_inputs[0][0].requires_grad
    assert not [name for name in folded.state_dict if name.endswith("num_batches_tracked")]
    assert "/" not in "".join(str(node.meta.get("stack_trace", "")) for node in folded.graph.nodes)  # names of files


def segmenter(name: str, **options) -> nn.Module:
    build = SMALL_BODIES[name]
    body = build(InPlaceABN, output_stride=32 if name == "wider" else 8, **options)
    head = DeepLabV3(body.out_channels, hidden_channels=4, out_channels=6, dilations=(2, 3, 4))
    return SegmentationNetwork(body, head, len(CLASSES))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "classification"])
@pytest.mark.parametrize("name", SMALL_BODIES)
def test_every_body_computes_the_same_at_other_sizes(name, task):
    network = segmenter(name) if task == "segmentation" else SMALL_BODIES[name](InPlaceABN, classes=len(CLASSES))
    made = predictor(network)
    assert largest_difference(exported(made).module(), made) < 1e-10
    made = made.float()
    assert largest_difference(exported(made, argmax=True).module(), made) < 1e-3
    assert largest_difference(exported(made).module(), made) < 1e-4


@pytest.mark.slow
def test_half_precision_rounds_folded_weights_once():
    """Norms that are left stay in float32."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), InPlaceABN(8), ABN(8), nn.Conv2d(8, len(CLASSES), 1))
    made = predictor(network, torch.float32)
    program = exported(made, dtype=torch.float16)
    assert largest_difference(program.module(), made) < 2e-3
    norm, conv = network[1].double(), network[0].double()
    gamma = norm.weight / (norm.running_var + norm.eps).sqrt()
    expected = (conv.weight * gamma[:, None, None, None]).half()
    assert torch.equal(program.state_dict["network.0.weight"], expected)
    assert {name: value.dtype for name, value in program.state_dict.items() if "network.2." in name}.keys()
    assert program.state_dict["network.2.running_var"].dtype == torch.float32
    assert program.module()(torch.zeros(1, 3, 40, 40)).dtype == torch.float32


@pytest.mark.slow
def test_a_network_with_a_pooling_window_is_exported_for_one_size():
    """The window is limited by its example's features, so the comparison at other sizes fails instead of the user's."""
    body = SMALL_BODIES["resnet-cifar"](InPlaceABN, output_stride=4, structure=(1, 1, 1))
    head = DeepLabV3(body.out_channels, hidden_channels=4, out_channels=6, pooling_size=(30, 31))
    made = predictor(SegmentationNetwork(body, head, len(CLASSES)))
    with pytest.raises((RuntimeError, ValueError)):
        largest_difference(exported(made).module(), made)
    assert largest_difference(exported(made, size=(97, 131)).module(), made, size=(97, 131)) < 1e-10
