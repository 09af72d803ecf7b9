"""A file of weights for images of another scale is doubted, and one for normalised images is not."""

import pytest
import torch

from datasets import camvid
from engine import assemble
from engine.training.input_scale import ratio_of_scales
from keepless import renew_statistics
from tests import trees
from tests.runs import run_config


@pytest.mark.parametrize("scale, doubted", [(1.0, False), (1 / 57, True), (10.0, True)])
def test_weights_for_levels_of_0_to_255_are_doubted(tmp_path, scale, doubted):
    """Caffe's networks have small weights in their first convolution."""
    torch.manual_seed(0)
    dataset = camvid(trees.camvid_folders(tmp_path), "train")
    config = run_config("data=camvid", "body=resnet18", "norm=std", "norm.backend=eager", "norm.activation=relu")
    network = assemble.network_of(config, 11)
    forward = assemble.forward(config, network, torch.device("cpu"))
    images = torch.stack([torch.from_numpy(dataset.read_image(index)) for index in range(6)]).permute(0, 3, 1, 2)
    renew_statistics(network, [forward.normalised(images)])
    network.body.mod1.conv1.weight.data *= scale
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    ratio = ratio_of_scales(forward, dataset, side=64)
    assert (ratio is not None) == doubted and (ratio is None or 0.3 < ratio / scale**2 < 3)
    assert all(torch.equal(value, statistics[name]) for name, value in network.named_buffers())
