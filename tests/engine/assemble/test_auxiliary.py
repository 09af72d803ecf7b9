"""An auxiliary head, below `head`: it trains with any other, and everything else goes on without it."""

from functools import partial

import pytest
import torch
from torch import nn

from engine import assemble
from engine.assemble.optimization import optimizer
from engine.checkpoint import files
from engine.checkpoint.initial_weights import initialise
from models.checkpoints.loading import is_auxiliary
from models.segmentation import Outputs, SegmentationNetwork, features_read
from tests.checkpoints import saved
from tests.runs import run_config

SMALL = ("norm.backend=eager", "head.hidden_channels=8", "head.out_channels=8")
WITH = "head.auxiliary_weight=0.4"
CLASSES = ("a", "b", "c")


def network(*words: str, classes: int = 3, **options) -> SegmentationNetwork:
    torch.manual_seed(0)
    return assemble.network_of(run_config(*SMALL, *words), classes, **options)


def test_it_adds_logits_in_training_and_leaves_the_rest_to_the_bit():
    without = network()
    whole = network(WITH)
    images = torch.randn(2, 3, 64, 64)
    added = {name for name in whole.state_dict() if is_auxiliary(name)}
    assert added and [*without.state_dict()] == [name for name in whole.state_dict() if name not in added]
    assert all(torch.equal(values, whole.state_dict()[name]) for name, values in without.state_dict().items())
    outputs, (stage, *_) = whole(images), whole.body.feature_info[-2:]
    assert torch.equal(outputs.main.logits, without(images).main.logits)
    (auxiliary,) = outputs.auxiliary
    assert (auxiliary.stride, auxiliary.weight) == (stage.stride, 0.4) and whole.strides == (8, stage.stride)
    assert auxiliary.logits.shape == (2, 3, 64 // stage.stride, 64 // stage.stride)
    torch.testing.assert_close(whole.eval()(images), without.eval()(images), rtol=0, atol=0)

    config = run_config(*SMALL, WITH)
    loss = assemble.loss(config.loss, network=whole)
    labels = torch.zeros(2, 64, 64, dtype=torch.uint8)
    main = Outputs(outputs.main)
    expected = loss(main, labels) + 0.4 * loss(Outputs(auxiliary._replace(weight=1.0)), labels)
    assert torch.equal(loss(outputs, labels), expected)
    expected.backward()
    assert all(parameter.grad is not None for parameter in whole.parameters())
    config.optim.head_lr_factor = 5.0
    groups = optimizer(config.optim, whole, config.head_modules).param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    of_body, of_auxiliary = whole.body.mod1.conv1.weight, whole.head.auxiliary.classifier.weight
    assert rates[id(of_auxiliary)] == 5 * rates[id(of_body)]


def test_a_checkpoint_with_it_opens_without_and_one_without_starts_it_at_random(tmp_path):
    path = tmp_path / "with.pt"
    without = tmp_path / "without.pt"
    saved(path, run_config(*SMALL, WITH), CLASSES)
    saved(without, run_config(*SMALL), CLASSES)
    make = partial(assemble.network_of, run_config(*SMALL, WITH), 3, auxiliary=False)
    opened = files.load_network(make, files.load(path), CLASSES, path)
    assert not any(map(is_auxiliary, opened.state_dict()))

    config = run_config(*SMALL, WITH, f"init.weights={without}")
    report = initialise(config, network(WITH), CLASSES)
    assert report.new and all(map(is_auxiliary, report.new)) and not report.skipped
    report = initialise(run_config(*SMALL, f"init.weights={path}"), network(), CLASSES)
    assert not report.new and report.skipped and all(map(is_auxiliary, report.skipped))
    report = initialise(run_config(*SMALL, WITH, f"init.weights={path}"), network(WITH), CLASSES)
    assert not report.new and not report.skipped
    four_classes = ("a", "b", "c", "d")
    config = run_config(*SMALL, WITH, f"init.weights={path}")
    new = initialise(config, network(WITH, classes=4), four_classes).new
    assert {name.rpartition(".")[0] for name in new} == {"cls", "head.auxiliary.classifier"} and len(new) == 4
    report = initialise(run_config(*SMALL, WITH, f"init.weights={path}", "init.part=body"), network(WITH), CLASSES)
    assert any(map(is_auxiliary, report.new)) and any(map(is_auxiliary, report.skipped))


def test_a_body_of_one_feature_is_refused_by_name():
    words = ("body=torchvision", "body.network=vgg11_bn", "body.output_stride=32", "norm=std")
    with pytest.raises(ValueError, match="head.auxiliary_weight=0.4 reads the feature at place -2 "):
        network(*words, WITH)


def test_a_head_may_have_several_and_its_channels_are_compared():
    class Classifier(nn.Module):
        def __init__(self, channels, reads, weight):
            super().__init__()
            self.reads = (reads,)
            self.loss_weight = weight
            self.layer = nn.Conv2d(channels, 3, 1)

        def forward(self, features):
            return self.layer(features[0])

    net = network("head.auxiliary_weight=0")
    (near,), (last,) = features_read(net.body, (4,), ""), features_read(net.body, (-1,), "")
    net.head.auxiliary = nn.ModuleList([Classifier(near.channels, 4, 0.4), Classifier(last.channels, -1, 0.2)])
    outputs = net(torch.rand(2, 3, 64, 64))
    assert [(output.stride, output.weight) for output in outputs.auxiliary] == [(4, 0.4), (net.stride, 0.2)]
    assert net.strides == (net.stride, 4, net.stride) and outputs.auxiliary[0].logits.shape == (2, 3, 16, 16)
    assert isinstance(net.eval()(torch.rand(1, 3, 64, 64)), torch.Tensor)
    net.cls = nn.Conv2d(net.cls.in_channels + 1, 3, 1)
    with pytest.raises(ValueError, match=r"^DeepLabV3 returned \(1, \d+, \d, \d\): expected \(N, \d+, h, w\), as its"):
        net(torch.rand(1, 3, 64, 64))
