"""Features of every stage: what a body says of them, and their gradients under every way to save activations."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from keepless import ABN, InPlaceABN
from models.bodies import Body, timm_body, torchvision_body
from models.recomputation import BLOCKS, recompute_blocks
from models.segmentation import SegmentationNetwork
from tests.bodies import SMALL_BODIES, small_densenet, small_revnet
from tests.models.test_recomputation import BODIES

LIBRARY = {
    "resnet18": partial(torchvision_body, network="resnet18"),
    "mobilenet_v2": partial(torchvision_body, network="mobilenet_v2", last="features.13"),
}


def names_of(body: nn.Module) -> list[str]:
    return [feature.name for feature in body.feature_info]


@pytest.mark.parametrize("name", [*SMALL_BODIES, *LIBRARY])
@torch.no_grad()
def test_a_body_gives_the_features_that_it_names_in_any_order(name):
    body = (LIBRARY | SMALL_BODIES)[name](partial(ABN, activation="relu"), output_stride=16 if name in LIBRARY else 32)
    names, images = names_of(body.eval()), torch.randn(1, 3, 64, 96)
    maps = body(images, names)
    for (_, channels, stride), feature in zip(body.feature_info, maps, strict=True):
        assert feature.shape == (1, channels, 64 // stride, 96 // stride)
    assert body.feature_info[-1][1:] == (body.out_channels, body.output_stride)
    assert torch.equal(maps[-1], body(images))
    first, last, again = body(images, [names[1], names[-1], names[1]])
    assert torch.equal(first, maps[1]) and torch.equal(last, maps[-1]) and again is first
    with pytest.raises(ValueError, match=rf"features=\('mod9',\): {type(body).__name__} has {names[0]}, "):
        body(images, ("mod9",))


def step(body: nn.Module, images: torch.Tensor, recompute: str = "none") -> list[torch.Tensor]:
    """Features, gradients and statistics of a step whose loss reads the last but one feature twice."""
    torch.manual_seed(0)
    for norm in body.modules():
        if isinstance(norm, ABN):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    recompute_blocks(body, recompute)
    names = names_of(body)
    maps = body(images, [names[0], names[-2], names[-1], names[-2]])
    sum((feature * torch.randn_like(feature)).sum() for feature in maps).backward()
    return [*maps, *(parameter.grad for parameter in body.parameters()), *body.buffers()]


@pytest.mark.table
@pytest.mark.parametrize("name", [*BODIES, *LIBRARY])
def test_gradients_are_the_same_to_the_bit_however_activations_are_saved(name):
    """A block that is repeated ends where a feature does; statistics move once."""
    images = torch.randn(2, 3, 64, 64)

    def built() -> nn.Module:
        torch.manual_seed(0)
        return (LIBRARY | BODIES)[name](partial(InPlaceABN, backend="eager"))

    expected = step(built(), images)
    assert all(values is not None for values in expected)
    for recompute in BLOCKS[1:]:
        assert all(map(torch.equal, step(built(), images, recompute), expected)), recompute


def test_a_reversible_body_gives_stages_that_its_chain_does_not_free():
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def tensors(**options) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return step(small_revnet(ABN, **options).double(), images)

    torch.testing.assert_close(tensors(), tensors(keep_activations=True), rtol=0, atol=1e-8)
    body = small_revnet(ABN)
    first, last = body(images.float(), ["mod2", "mod4"])
    before = first.detach().clone()
    last.sum().backward(retain_graph=True)
    assert torch.equal(first, before)
    first.sum().backward()


@torch.no_grad()
def test_features_of_torchvision_are_its_modules_and_those_of_timm_are_timm_s():
    library = torchvision.models.resnet18(weights=None).eval()
    body = torchvision_body(network="resnet18", output_stride=8).eval()
    assert [tuple(feature) for feature in body.feature_info] == [
        *(("relu", 64, 2), ("layer1", 64, 4), ("layer2", 128, 8), ("layer3", 256, 8), ("layer4", 512, 8))
    ]
    body.load_state_dict({name: values for name, values in library.state_dict().items() if not name.startswith("fc.")})
    outputs, hooks = {}, []
    for network, modules in (("theirs", library), ("ours", body)):
        for name in ("relu", "layer1"):
            note = lambda *call, key=(network, name): outputs.__setitem__(key, call[-1])  # noqa: E731
            hooks.append(getattr(modules, name).register_forward_hook(note))
    images = torch.randn(1, 3, 64, 64)
    library(images)
    stem, first = body(images, ["relu", "layer1"])
    torch.testing.assert_close(first, outputs["theirs", "layer1"])
    torch.testing.assert_close(stem, outputs["theirs", "relu"])
    assert outputs["ours", "layer1"] is first  # its hooks fire
    assert names_of(torchvision_body(network="mobilenet_v2", last="features.13"))[-2:] == ["features.6", "features.13"]
    timm = pytest.importorskip("timm")
    info = timm.create_model("resnet18", features_only=True).feature_info
    ours = [(name, channels, stride) for name, channels, stride in timm_body(network="resnet18").feature_info]
    assert ours == [*zip(info.module_name(), info.channels(), info.reduction(), strict=True)]


def test_a_body_that_runs_nothing_is_refused_by_name():
    class Empty(Body):
        """Forgot its forward."""

    head = nn.Identity()
    head.out_channels = 8
    for use in (lambda body: body(torch.zeros(1, 3, 8, 8)), lambda body: SegmentationNetwork(body, head, 2)):
        with pytest.raises(ValueError, match="^Empty has neither forward"):
            use(Empty())


def test_a_norm_that_would_write_over_a_feature_is_refused():
    overwriting, images = partial(InPlaceABN, overwrite_input=True, backend="eager"), torch.randn(2, 3, 64, 64)
    for body in (small_densenet(overwriting), torchvision_body(overwriting, network="densenet121")):
        body(images)
        with pytest.raises(ValueError, match="wrote over its input, which is a feature"):
            body(images, [names_of(body)[1], names_of(body)[-1]])


def test_layers_without_blocks_give_features_however_activations_are_saved():
    pytest.importorskip("timm")
    body, images = timm_body(partial(ABN, activation="relu"), network="vgg11_bn"), torch.randn(2, 3, 64, 64)
    names = names_of(body.eval())
    expected = body(images, names)
    for recompute in BLOCKS[1:]:
        recompute_blocks(body, recompute)
        assert all(map(torch.equal, body(images, names), expected)), recompute
