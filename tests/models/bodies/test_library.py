"""Networks of torchvision and timm as bodies: their features, dilated, with every norm that their weights allow."""

import copy
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import assemble
from keepless import ABN, CheckpointedABN, InPlaceABN
from models.bodies import LibraryBody, timm_body, torchvision_body
from models.checkpoints.published import IMAGENET, stated_normalisation, timm_tags
from models.checkpoints.torchvision_names import from_library
from models.recomputation import RECOMPUTE, choose_recomputation
from tests.bodies import trained
from tests.runs import run_config

LAST = {  # fifteen networks, and the module of torchvision that makes their features
    **dict.fromkeys(("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2"), "layer4"),
    **dict.fromkeys(("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0"), "features"),
    **dict.fromkeys(("convnext_tiny", "densenet121", "vgg11_bn"), "features"),
    **dict.fromkeys(("regnet_x_400mf", "regnet_y_400mf"), "trunk_output"),
    **{"shufflenet_v2_x1_0": "conv5", "mnasnet0_5": "layers"},
}
QUICK = ("resnet18", "mobilenet_v3_small")
LARGE = ("resnet50", "resnext50_32x4d", "wide_resnet50_2")
UNDILATED = ("densenet121", "vgg11_bn")
NORMS = ("std", "inplace norm.activation=leaky_relu", "inplace_1 norm.activation=elu", "std norm.activation=leaky_relu")
TIMMS = ("resnet18", "resnet26d", "mobilenetv3_small_050", "efficientnet_b0", "convnext_atto", "regnetx_002")
LEAKY, IN_PLACE = partial(ABN, activation="leaky_relu"), partial(InPlaceABN, backend="eager")


def some_slow(names):
    marks = {name: pytest.mark.slow(*["large"] * (name in LARGE)) for name in names if name not in QUICK}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def exchanged(network: nn.Module, old: tuple[type[nn.Module], ...], new: Callable[[], nn.Module]) -> nn.Module:
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child) in old:
                setattr(parent, name, new())
    return network


def library_features(network: nn.Module, name: str, images: torch.Tensor) -> torch.Tensor:
    """Those that the library's own module computes, without our code."""
    features = []
    hook = network.get_submodule(LAST[name]).register_forward_hook(lambda *call: features.append(call[-1]))
    network(images)
    hook.remove()
    return features[0].relu() if name == "densenet121" else features[0]


@pytest.mark.parametrize("name", some_slow(LAST))
@torch.no_grad()
def test_features_are_torchvision_s(name):
    """Standard norms are compared in float32 and float64, in-place ones with the network with leaky ReLUs."""
    torch.manual_seed(0)
    library = trained(torchvision.models.get_model(name, weights=None))
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    expected = library_features(library, name, images)
    body = torchvision_body(network=name).double().eval()
    classifier = {key for key in library.state_dict() if key not in body.state_dict()}
    assert all(key.startswith(("fc.", "classifier.")) for key in classifier)
    weights = {key: tensor for key, tensor in library.state_dict().items() if key not in classifier}
    body.load_state_dict(weights)
    assert body.out_channels == expected.shape[1] and body.output_stride == 32 and expected.std() > 0
    scale = expected.abs().max().item()
    torch.testing.assert_close(body(images), expected, rtol=0, atol=1e-10 * scale)
    single = body.float()(images.float())
    torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-5 * scale)

    leaky = library_features(exchanged(library, (nn.ReLU, nn.ReLU6), partial(nn.LeakyReLU, 0.01)), name, images)
    norms = {"densenet121": (), "convnext_tiny": (LEAKY,)}  # its last ReLU is a function in torchvision; layer norms
    for norm in norms.get(name, (LEAKY, IN_PLACE)):
        body = torchvision_body(norm, network=name).double().eval()
        body.load_state_dict(weights)
        torch.testing.assert_close(body(images), leaky, rtol=0, atol=1e-10 * leaky.abs().max().item())


def check_dilation(build, output_strides: tuple[int, ...], first: int = 0) -> None:
    """Every cell of the strided network is one of the dilated network's. Without global pooling, as these have more."""
    torch.manual_seed(0)
    pooling = (nn.AdaptiveAvgPool2d,)
    strided = exchanged(trained(build()), pooling, nn.Identity)
    images = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    expected = strided(images)
    for output_stride in output_strides:
        factor = 32 // output_stride
        dilated = exchanged(build(output_stride=output_stride).double().eval(), pooling, nn.Identity)
        dilated.load_state_dict(strided.state_dict())
        features = dilated(images)
        assert dilated.output_stride == output_stride and features.shape[2:] == (3 * factor, 2 * factor)
        matching = features[:, :, first * (factor == 4) :: factor, first * (factor == 4) :: factor]
        torch.testing.assert_close(matching, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
        assert dilated(images[:, :, :67, :45]).shape[2:] == (-(-67 // output_stride), -(-45 // output_stride))


@pytest.mark.parametrize("name", some_slow([name for name in LAST if name not in UNDILATED]))
@torch.no_grad()
def test_a_dilated_network_has_the_strided_one_s_features(name):
    """ConvNeXt's 2x2 convolutions read the cells around, so the strided network's cells are between others."""
    check_dilation(partial(torchvision_body, network=name), (8, 16), first=int(name.startswith("convnext")))


class Reversed(nn.Module):
    """A stage that lists its convolutions in another order than it runs them."""

    def __init__(self):
        super().__init__()
        self.block, self.downsample = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.downsample(x))


@torch.no_grad()
def test_convolutions_are_dilated_in_whichever_order_they_are_listed():
    """timm's FasterNets list a stage's blocks before the convolution that strides."""
    layers = {"stem": nn.Conv2d(3, 8, 3, stride=2, padding=1), "stage": Reversed()}
    strided, dilated = (
        LibraryBody(LEAKY, 0, stride, make=lambda *_: copy.deepcopy(layers), network="it") for stride in (4, 2)
    )
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(dilated(images)[:, :, ::2, ::2], strided(images))


class Shortcut(nn.Module):
    """A block of stride 2 whose shortcut pools."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.pool(x)


@torch.no_grad()
def test_no_pixel_is_dropped_whichever_stride_rounds_down():
    """DenseNets' transitions do, and not their stem; a shortcut of timm's dla34, whose sum then fails for odd sizes."""
    layers = {"stem": nn.Conv2d(3, 8, 3, stride=2, padding=1)}
    for layers["block"], size in ((nn.AvgPool2d(2), (66, 63)), (Shortcut(), (65, 62))):
        body = LibraryBody(LEAKY, 0, 32, make=lambda *_: layers, network="it")
        assert body.output_stride == 4 and body(torch.zeros(1, 3, *size)).shape[2:] == (17, 16)
    with pytest.raises(ValueError, match="output_stride=2, because its Shortcut strides .*: give output_stride=4"):
        LibraryBody(LEAKY, 0, 2, make=lambda *_: layers, network="it")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAST])
def test_every_network_composes_steps_and_evaluates(name):
    """Norms and ways to recompute take turns; gradients equal the ones that stored activations give."""
    number = [*LAST].index(name)
    norm, recompute = NORMS[number % len(NORMS)], RECOMPUTE[number % len(RECOMPUTE)]
    stride = 32 if name in UNDILATED else 16
    keys = ("body=torchvision", f"body.network={name}", f"body.output_stride={stride}", "trainer.smoke=true")
    config = run_config(*keys, *f"norm={norm}".split(), f"trainer.recompute={recompute}")
    torch.manual_seed(0)
    network = assemble.network_of(config, 3)
    stored = copy.deepcopy(network) if recompute in ("blocks", "sqrt") else None
    images, random = torch.randn(2, 3, 64, 64), torch.get_rng_state()
    network(images).main.logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    if stored is not None:
        choose_recomputation(stored, stored.body, "none")
        torch.set_rng_state(random)
        stored(images).main.logits.square().mean().backward()
        for ours, reference in zip(network.parameters(), stored.parameters(), strict=True):
            scale = reference.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-5 * scale)
        for ours, reference in zip(network.buffers(), stored.buffers(), strict=True):
            torch.testing.assert_close(ours, reference)
    torch.optim.SGD(network.parameters(), lr=1e-4).step()
    assert network.eval()(torch.randn(1, 3, 67, 45)).shape == (1, 3, 67, 45)
    again = assemble.network_of(config, 3)
    again.load_state_dict(network.state_dict())


@pytest.mark.parametrize("recompute", ("blocks", "sqrt"))
def test_an_activation_after_the_first_block_may_overwrite_its_input(recompute):
    """The first convolution of timm's resnet50d is a block."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 1))
    stem = {"conv1": first, "bn1": nn.BatchNorm2d(8), "act1": nn.ReLU(inplace=True)}
    layers = stem | {f"layer{number}": nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for number in range(3)}
    body = LibraryBody(LEAKY, 0, 32, make=lambda *_: layers, network="it")
    stored = copy.deepcopy(body)
    body.recompute = recompute
    images = torch.randn(2, 3, 8, 8)
    for network in (body, stored):
        network(images).square().mean().backward()
    for ours, reference in zip(body.parameters(), stored.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad)


@pytest.mark.slow
def test_blocks_compile():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    body = torchvision_body(IN_PLACE, network="resnet18").double()
    expected = body(images)
    body.recompute = "blocks"
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(body, backend="aot_eager", fullgraph=True)(images), expected)


def test_norms_take_the_options_of_the_run_and_keep_their_eps():
    options = dict(momentum=0.3, backend="eager", sync=True)
    std = torchvision_body(partial(ABN, activation="relu", **options), network="mobilenet_v3_small")
    inplace = torchvision_body(partial(InPlaceABN, variant="I", **options), network="mobilenet_v3_small")
    for body, kinds in ((std, {ABN}), (inplace, {ABN, InPlaceABN})):
        norms = [module for module in body.modules() if isinstance(module, (ABN, nn.BatchNorm2d))]
        assert {type(norm) for norm in norms} == kinds and len(norms) == 34
        assert {(norm.eps, norm.momentum, norm.backend, norm.sync) for norm in norms} == {(1e-3, 0.3, "eager", True)}
    assert {norm.variant for norm in norms if isinstance(norm, InPlaceABN)} == {"I"}
    for norm in (partial(ABN, activation="relu", **options), partial(InPlaceABN, **options)):
        body = torchvision_body(norm, network="mobilenet_v3_small", own_momentum=True)
        assert {m.momentum for m in body.modules() if isinstance(m, (ABN, nn.BatchNorm2d))} == {0.01}
    assert len(inplace.remarks) == 2 and std.remarks == ()
    unscaled = torchvision_body(partial(ABN, activation="relu", learn_scale=False), network="mobilenet_v3_small")
    assert not any(key.endswith("1.weight") and "bn" in key for key in dict(unscaled.named_parameters()))
    assert sum(norm.weight is None for norm in unscaled.modules() if isinstance(norm, ABN)) == 34


@torch.no_grad()
def test_a_body_may_end_early():
    """It then has the features of that part, and a file of the whole network fits it."""
    torch.manual_seed(0)
    library, images = torchvision.models.mobilenet_v2(weights=None).eval(), torch.randn(1, 3, 64, 64)
    body = torchvision_body(network="mobilenet_v2", last="features.13").eval()
    assert (body.out_channels, body.output_stride) == (96, 16)
    tensors, remarks = from_library(library.state_dict(), body.state_dict(), body.left_out)
    assert remarks == () and not body.load_state_dict(tensors, strict=False).missing_keys
    assert all(name.startswith("classifier.") for name in tensors.keys() - body.state_dict().keys())
    torch.testing.assert_close(body(images), library.features[:14](images), rtol=0, atol=0)
    whole = torchvision_body(network="resnet18", last="layer3")
    assert (whole.order[-1], whole.left_out, whole.out_channels) == ("layer3", ("layer4",), 256)
    for last in ("features.40", "stem", "features.0.0.x"):
        with pytest.raises(ValueError, match=f"last={last}: mobilenet_v2 has no such part"):
            torchvision_body(network="mobilenet_v2", last=last)


@pytest.mark.parametrize("name", ["regnet_x_400mf", *some_slow(["convnext_tiny", "resnet50"])])
def test_a_body_can_be_planned_and_classify(name):
    """RegNet's constructor could not compute its widths under fake tensors."""
    with FakeTensorMode():
        norm = LEAKY if name == "convnext_tiny" else IN_PLACE
        body = torchvision_body(norm, classes=7, output_stride=8, network=name)
        logits = body(torch.randn(2, 3, 64, 64))
        logits.sum().backward()
    assert logits.shape == (2, 7) and all(p.grad.shape == p.shape for p in body.parameters())
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in torchvision_body(network=name).state_dict().values())


SILU = {"conv": nn.Conv2d(3, 8, 3, stride=2, padding=1), "norm": nn.BatchNorm2d(8), "act": nn.SiLU()}
NOWHERE = {"norm_act": IN_PLACE, "make": lambda *_: SILU}


@pytest.mark.parametrize(
    "network, options, message",
    [
        ("resnet51", {}, "network=resnet51: torchvision has no such network; the nearest are resnet"),
        ("densenet121", dict(output_stride=8), "_Transition strides without a convolution: give output_stride=32, or"),
        ("googlenet", {}, "googlenet does not run its conv1, .* aux2 one .*: expected a network"),
        ("squeezenet1_1", {}, "squeezenet1_1 has 3 cells for 64 pixels"),
        ("resnet18", dict(norm_act=partial(CheckpointedABN, activation="relu")), "CheckpointedABN: .* ABN or In"),
        ("it", dict(NOWHERE, instead="norm=std saves less"), "no norm that can be in place: norm=std saves less"),
    ],
)
def test_networks_and_options_that_cannot_be_are_refused(network, options, message):
    with pytest.raises(ValueError, match=message):
        torchvision_body(network=network, **options)


@pytest.mark.table
@pytest.mark.parametrize("name", TIMMS)
@torch.no_grad()
def test_features_are_timm_s(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    library = trained(timm.create_model(name, features_only=True, out_indices=(-1,)))
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    (expected,) = library(images)
    body = timm_body(network=name).double().eval()
    body.load_state_dict(library.state_dict())
    torch.testing.assert_close(body(images), expected, rtol=0, atol=1e-10 * expected.abs().max().item())
    assert all(isinstance(norm, ABN) for norm in body.modules() if isinstance(norm, nn.BatchNorm2d | ABN))
    if name != "convnext_atto":  # has no batch norms
        with torch.enable_grad():
            inplace = timm_body(IN_PLACE, network=name)
            inplace.recompute = "blocks"
            inplace(images.float()).mean().backward()
        leaky = timm_body(LEAKY, network=name).double().eval()
        leaky.load_state_dict(library.state_dict())
        inplace.double().eval().load_state_dict(library.state_dict())
        torch.testing.assert_close(inplace(images), leaky(images), rtol=1e-10, atol=1e-10)
    if name in ("resnet18", "convnext_atto", "regnetx_002"):  # the others average cells: over all, or in shortcuts
        check_dilation(partial(timm_body, network=name), (8, 16), first=int(name.startswith("convnext")))


@pytest.mark.parametrize(
    "name, reason",
    [("hrnet_w18_small", "NotImplementedError"), ("vit_tiny_patch16_224", "AssertionError: Input height")],
)
def test_networks_of_timm_that_cannot_be_are_refused(name, reason):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=f"timm's {name} does not run its modules .*{reason}.*: expected a network of"):
        timm_body(network=name)


def test_maps_whose_channels_are_last_become_features_as_heads_read_them():
    """Strides were read along their channels: Swin's three first features were of stride 0."""
    body = torchvision_body(network="swin_t")
    assert [feature[1:] for feature in body.feature_info] == [(96, 4), (192, 8), (384, 16), (768, 32)]
    assert (body.out_channels, body.output_stride) == (768, 32)
    images, reference = torch.randn(1, 3, 64, 96), torchvision.models.swin_t().eval()
    reference.load_state_dict(body.state_dict(), strict=False)  # without its classifier
    names = [feature.name for feature in body.feature_info]
    with torch.no_grad():
        maps = body.eval()(images, features=names)
        expected = [reference.features[: 2 * stage](images).permute(0, 3, 1, 2) for stage in (1, 2, 3)]
        expected.append(reference.permute(reference.norm(reference.features(images))))
        assert all(map(torch.equal, maps, expected)) and torch.equal(body(images), maps[-1])
        early = torchvision_body(network="swin_t", last="features.3")
        assert early(images).shape == (1, 192, 8, 12) == (1, early.out_channels, 64 // 8, 96 // 8)
    with pytest.raises(ValueError, match="merges patches and attends within windows, so it can neither be dilated"):
        torchvision_body(network="swin_t", output_stride=16)


@pytest.mark.parametrize(
    "stated, problem",
    [
        ("null", "pretrained_cfg=None: expected a mapping with mean and std"),
        ('{"mean": null, "std": [1, 1, 1]}', "states mean=None: expected a number for each channel"),
        ('{"mean": [0.5, NaN, 0.5], "std": [1, 1, 1]}', r"states mean=\[0.5, nan, 0.5\]"),
        ('{"mean": [0.5, 0.5, [0.5]], "std": [1, 1, 1]}', r"states mean=\[0.5, 0.5, \[0.5\]\]"),
        ('{"mean": [0.5, 0.5, 0.5], "std": [1, 0, 1]}', r"states std=\[1, 0, 1\]: .* for each channel, above 0$"),
        ('{"mean": [0.5, 0.5, 0.5], "std": "1"}', "states std=1: expected a number for each channel, above 0"),
    ],
)
def test_a_config_json_of_timm_that_states_no_normalisation_is_named(tmp_path, stated, problem):
    (tmp_path / "config.json").write_text(f'{{"pretrained_cfg": {stated}}}')
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json:? {problem}"):
        stated_normalisation(tmp_path / "model.safetensors", {})


def test_weights_of_timm_are_named_with_their_tag_and_normalise_unless_told(tmp_path):
    pytest.importorskip("timm")
    half, name = [0.5, 0.5, 0.5], "resnet34.ra4_e3600_r224_in1k"
    data = run_config("body=timm", f"body.network={name}", "norm=std").data
    assert data.mean == data.std == half
    assert run_config("body=timm", "body.network=resnet34", "norm=std").data.mean == [*IMAGENET.mean]
    assert run_config("body=timm", "body.network=own", "norm=std").data.mean == [*IMAGENET.mean]
    data = run_config("body=timm", f"body.network={name}", "norm=std", "data.std=[1,1,1]").data
    assert (data.mean, data.std) == (half, [1, 1, 1])
    assert run_config("body=torchvision", "body.network=googlenet", "norm=std").data.std == half
    assert [*timm_body(network=name).state_dict()] == [*timm_body(network="resnet34").state_dict()]
    with pytest.raises(ValueError, match="network=resnet34.layer3: expected resnet34; body.last=layer3 ends with"):
        timm_body(network="resnet34.layer3")
    assert {len(tags) for tags in timm_tags("resnet34").values()} == {6, 1} and timm_tags(name) == {}
    stated = {"args": Namespace(model=name, mean=None, std=None)}
    assert stated_normalisation(tmp_path / "a.pth", stated).mean == (0.5, 0.5, 0.5)
    assert stated_normalisation(tmp_path / "a.pth", {}) is None
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}}')
    assert stated_normalisation(tmp_path / "model.safetensors", {}).mean == (0.1, 0.2, 0.3)


def test_without_timm_its_body_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="body=timm needs timm .*pip install timm, or give body=torchvision"):
        timm_body(network="resnet18")
