"""Residual blocks: the buffers of the paper's Figure 1, the shortcut's equation, strides replaced by dilation."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.blocks import IdentityResidualBlock, dilate_strides, identity_stage
from models.layers import ABN, InPlaceABN


def saved_activations(block: nn.Module, x: torch.Tensor) -> dict[int, int]:
    """Bytes of every distinct storage with at least one value per pixel that the block keeps for its backward pass."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    kept, storages = [], {}

    def pack(tensor):
        kept.append(tensor)  # alive, so that no address is used twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() >= pixels:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return storages


@pytest.mark.parametrize("norm_act, buffers", [(ABN, 6), (InPlaceABN, 3)])
def test_identity_bottleneck_keeps_the_buffers_of_figure_1(norm_act, buffers):
    block = IdentityResidualBlock(16, (16, 16, 16), norm_act=norm_act, groups=4)
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    storages = saved_activations(block, x)
    assert len(storages) == buffers
    assert set(storages.values()) == {x.numel() * x.element_size()}
    assert (x.untyped_storage().data_ptr() in storages) == (norm_act is ABN)


@pytest.mark.parametrize("norm_act, buffers", [(ABN, 4), (InPlaceABN, 2)])
def test_identity_block_of_two_convolutions_keeps_half(norm_act, buffers):
    block = IdentityResidualBlock(16, (16, 16), norm_act=norm_act)
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    assert len(saved_activations(block, x)) == buffers


@pytest.mark.parametrize("norm_act", [ABN, InPlaceABN])
def test_projecting_block_saves_nothing_for_its_shortcut(norm_act):
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    plain = IdentityResidualBlock(16, (8, 8, 16), norm_act=norm_act)
    projecting = IdentityResidualBlock(16, (8, 8, 32), norm_act=norm_act)
    assert sorted(saved_activations(plain, x).values()) == sorted(saved_activations(projecting, x).values())


def test_without_projection_the_shortcut_is_the_raw_input():
    block = IdentityResidualBlock(8, (4, 4, 8), norm_act=InPlaceABN)
    nn.init.zeros_(block.convs.conv3.weight)
    x = torch.randn(2, 8, 5, 5)
    assert block.proj_conv is None
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("in_channels, stride", [(6, 1), (8, 2)])
def test_the_projection_takes_the_activated_input(in_channels, stride):
    block = IdentityResidualBlock(in_channels, (4, 4, 8), norm_act=InPlaceABN, stride=stride).eval()
    block.bn1.running_mean.uniform_(-1, 1)
    nn.init.zeros_(block.convs.conv3.weight)
    x = torch.randn(2, in_channels, 7, 7)
    with torch.no_grad():
        normalised = (x - block.bn1.running_mean.view(1, -1, 1, 1)) / (1 + block.bn1.eps) ** 0.5
        activated = torch.where(normalised > 0, normalised, 0.01 * normalised)
        expected = torch.nn.functional.conv2d(activated, block.proj_conv.weight, stride=stride)
        torch.testing.assert_close(block(x), expected)


def test_a_norm_over_the_shortcut_is_refused_and_fits_everywhere_else():
    overwriting = partial(InPlaceABN, overwrite_input=True)
    x = torch.randn(2, 8, 5, 5)
    with pytest.raises(ValueError, match="wrote over the input of a residual block.*overwrite_input=False"):
        IdentityResidualBlock(8, (4, 4, 8), norm_act=overwriting)(x.clone())

    torch.manual_seed(0)
    block = IdentityResidualBlock(8, (4, 4, 16), norm_act=InPlaceABN)
    torch.manual_seed(0)
    twin = IdentityResidualBlock(8, (4, 4, 16), norm_act=overwriting)
    assert torch.equal(block(x), twin(x.clone()))


@pytest.mark.parametrize("channels", [(8, 16), (8, 8, 16)])
@pytest.mark.parametrize("norm_act", [ABN, InPlaceABN])
def test_every_parameter_gets_a_gradient(channels, norm_act):
    torch.manual_seed(0)
    block = IdentityResidualBlock(6, channels, norm_act=norm_act, stride=2, dilation=2, dropout=0.5).double()
    out = block(torch.randn(3, 6, 9, 9, dtype=torch.float64))
    assert out.shape == (3, 16, 5, 5)
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-6, name


def test_state_dict_names_and_the_place_of_dropout():
    block = IdentityResidualBlock(4, (4, 4, 8), norm_act=InPlaceABN, dropout=0.3)
    assert [name for name, _ in block.named_parameters() if "conv" in name.rsplit(".", 2)[-2]] == [
        "convs.conv1.weight",
        "convs.conv2.weight",
        "convs.conv3.weight",
        "proj_conv.weight",
    ]
    assert list(block.convs._modules) == ["conv1", "bn2", "conv2", "bn3", "dropout", "conv3"]
    assert list(IdentityResidualBlock(4, (4, 8), norm_act=ABN, dropout=0.3).convs._modules) == [
        "conv1",
        "bn2",
        "dropout",
        "conv2",
    ]


def test_a_stage_changes_stride_and_channels_in_its_first_block_only():
    stage = identity_stage(4, (6, 6, 8), 3, norm_act=InPlaceABN, stride=2)
    assert list(stage._modules) == ["block1", "block2", "block3"]
    assert [block.proj_conv is not None for block in stage] == [True, False, False]
    assert stage(torch.randn(1, 4, 12, 12)).shape == (1, 8, 6, 6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(channels=(4,)), r"channels=\(4,\): expected two values"),
        (dict(channels=(4, 4), groups=2), "groups=2 with channels=.*three channel values"),
        (dict(channels=(6, 6, 8), groups=4), "groups=4 does not divide the channels 6 and 6"),
    ],
)
def test_wrong_channels_name_the_value_and_the_expectation(options, message):
    with pytest.raises(ValueError, match=message):
        IdentityResidualBlock(4, norm_act=ABN, **options)


def test_an_empty_stage_is_refused():
    with pytest.raises(ValueError, match="0 blocks.*at least 1"):
        identity_stage(4, (4, 4), 0, norm_act=ABN)


@pytest.mark.parametrize(
    "strides, output_stride, expected",
    [
        ((1, 2, 2, 2), 32, [(1, 1), (2, 1), (2, 1), (2, 1)]),
        ((1, 2, 2, 2), 16, [(1, 1), (2, 1), (2, 1), (1, 2)]),
        ((1, 2, 2, 2), 8, [(1, 1), (2, 1), (1, 2), (1, 4)]),
        ((1, 1, 2, 2, 2, 1), 8, [(1, 1), (1, 1), (2, 1), (1, 2), (1, 4), (1, 4)]),
        ((1, 1, 2, 2, 2, 1), 16, [(1, 1), (1, 1), (2, 1), (2, 1), (1, 2), (1, 2)]),
    ],
)
def test_strides_beyond_the_output_stride_become_dilation(strides, output_stride, expected):
    assert dilate_strides(strides, stem_stride=4, output_stride=output_stride) == expected


@given(st.permutations([1, 1, 2, 2, 2]), st.sampled_from([8, 16, 32]))
@settings(deadline=None)
def test_stride_times_dilation_is_what_the_strides_ask_for(strides, output_stride):
    plan = dilate_strides(strides, stem_stride=4, output_stride=output_stride)
    wanted, reached = 4, 4
    for stride, (used, dilation) in zip(strides, plan, strict=True):
        wanted, reached = wanted * stride, reached * used
        assert reached * dilation == wanted
    assert reached == output_stride


def test_other_output_strides_are_refused():
    with pytest.raises(ValueError, match="output_stride=4: expected 8"):
        dilate_strides((1, 2, 2, 2), stem_stride=4, output_stride=4)
