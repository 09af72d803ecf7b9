"""Exported programs: the same logits at any size."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from engine.prediction.predictors import ImageFormat, Predictor
from engine.prediction.programs import FromLevels, largest_difference, program_of, whole_paddings
from keepless import ABN, InPlaceABN
from models.forward import Forward
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests.bodies import SMALL_BODIES, trained

CLASSES = [str(number) for number in range(5)]


def predictor(network: nn.Module, dtype: torch.dtype = torch.float64) -> Predictor:
    """A predictor with random statistics, scales and shifts."""
    mean, std = (torch.tensor(levels)[None, :, None, None] for levels in ([120.0, 110, 100], [60.0, 61, 62]))
    forward = Forward(trained(network), mean, std, torch.contiguous_format, nullcontext)
    return Predictor(forward, CLASSES, ImageFormat()).to(dtype)


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
    original = predictor(network)
    assert largest_difference(program_of(original).module(), original) < 1e-10
    original = original.float()
    assert largest_difference(program_of(original, argmax=True).module(), original) < 1e-3
    assert largest_difference(program_of(original).module(), original) < 1e-4


def test_weights_trained_in_channels_last_are_contiguous():
    """Also 1x1 weights, which count as contiguous in both layouts."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)).to(memory_format=torch.channels_last)
    for weight in FromLevels(predictor(network), torch.float32, argmax=False).parameters():
        assert weight.stride() == torch.empty(weight.shape).stride()


@pytest.mark.slow
@pytest.mark.parametrize("stride", [8, 32])
def test_a_program_takes_every_size_that_the_network_takes(stride):
    """A 1x1 convolution trained in channels_last made the program assert that no side of a feature map is 1."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, stride, padding=1), ABN(8), nn.Conv2d(8, 8, 1), ABN(8))
    body.output_stride = stride
    head = DeepLabV3(8, hidden_channels=4, out_channels=6, dilations=(2,), norm_act=ABN)
    network = SegmentationNetwork(body, head, len(CLASSES)).to(memory_format=torch.channels_last)
    original = predictor(network, torch.float32)
    program = program_of(original).module()
    for size in ((1, 1), (stride, 90), (90, stride), (stride + 1, 1)):
        images = 255 * torch.rand(1, 3, *size) + 1
        torch.testing.assert_close(program(images), original(images))


def test_a_program_cuts_the_finer_cells_of_a_head_at_every_size():
    """The example's sides, multiples of the body's stride, need no cut."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 8, padding=1), ABN(8))
    body.output_stride = 8
    head = nn.Sequential(nn.Conv2d(8, 6, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
    head.out_channels, head.output_stride = 6, 4
    original = predictor(SegmentationNetwork(body, head, len(CLASSES)))
    assert largest_difference(program_of(original).module(), original) < 1e-10


def test_norms_stay_in_float32_and_no_file_is_named():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), InPlaceABN(8), nn.Conv2d(8, len(CLASSES), 1))
    original = predictor(network, torch.float32)
    program = program_of(original, dtype=torch.float16)
    assert largest_difference(program.module(), original) < 2e-3
    assert program.state_dict["network.0.weight"].dtype == torch.float16
    assert program.state_dict["network.1.running_var"].dtype == torch.float32
    assert program.module()(torch.zeros(1, 3, 40, 40)).dtype == torch.float32
    assert "/" not in "".join(str(node.meta.get("stack_trace", "")) for node in program.graph.nodes)


@pytest.mark.slow
def test_a_network_with_a_pooling_window_is_exported_for_one_size():
    """The window is limited by its example's features, so the comparison at other sizes fails instead of the user's."""
    body = SMALL_BODIES["resnet-cifar"](InPlaceABN, output_stride=4, structure=(1, 1, 1))
    head = DeepLabV3(body.out_channels, hidden_channels=4, out_channels=6, pooling_size=(30, 31))
    original = predictor(SegmentationNetwork(body, head, len(CLASSES)))
    with pytest.raises((RuntimeError, ValueError)):
        largest_difference(program_of(original).module(), original)
    assert largest_difference(program_of(original, size=(97, 131)).module(), original, size=(97, 131)) < 1e-10


@pytest.mark.slow
def test_a_body_that_adds_in_float32_is_refused_in_16_bits_with_the_reason():
    with pytest.raises(ValueError, match=r"images of 32x32 pixels in torch.float16: .*such as RevNets, need float32"):
        program_of(predictor(segmenter("revnet"), torch.float32), size=(32, 32), dtype=torch.float16)


def test_paddings_of_whole_numbers_are_timm_s_and_stay_in_the_export():
    """timm's own padding made the export of EfficientNet-Lite0 take more than ten minutes."""
    padding = pytest.importorskip("timm.layers.padding")
    sizes = [(x, k, s, d) for x in range(1, 40) for k in (1, 3, 5) for s in (1, 2, 3) for d in (1, 2)]
    of_timm = padding.get_same_padding
    with whole_paddings():
        replaced = padding.get_same_padding
    assert padding.get_same_padding is of_timm is not replaced
    assert [replaced(*arguments) for arguments in sizes] == [of_timm(*arguments) for arguments in sizes]
