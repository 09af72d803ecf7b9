"""Residual blocks: the buffers that they keep, their equations, strides replaced by dilation."""

from functools import partial

import pytest
import torch

from keepless import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from keepless.norms.backends.activations import ACTIVATIONS, Activation, activate_
from models.blocks import Convolutions, IdentityResidualBlock, ResidualBlock
from tests.bodies import kept_maps


@pytest.mark.parametrize("channels, groups, standard, in_place", [((16, 16, 16), 4, 6, 3), ((16, 16), 1, 4, 2)])
def test_identity_blocks_keep_the_buffers_of_figure_1(channels, groups, standard, in_place):
    """A projection keeps no more."""
    for norm_act, buffers in ((ABN, standard), (InPlaceABN, in_place)):
        block = IdentityResidualBlock(Convolutions(16, channels, groups=groups), norm_act)
        x = torch.randn(2, 16, 8, 8, requires_grad=True)
        storages = kept_maps(block, x)
        assert list(storages.values()) == [x.nbytes] * buffers
        assert (x.untyped_storage()._cdata in storages) == (norm_act is ABN)
        projecting = IdentityResidualBlock(Convolutions(16, (*channels[:-1], 32), groups=groups), norm_act)
        assert list(kept_maps(projecting, x).values()) == [x.nbytes] * buffers


def test_a_norm_over_the_shortcut_is_refused_and_fits_everywhere_else():
    overwriting = partial(InPlaceABN, overwrite_input=True)
    x = torch.randn(2, 8, 5, 5)
    with pytest.raises(ValueError, match="wrote over the input of a residual block.*overwrite_input=False"):
        IdentityResidualBlock(Convolutions(8, (4, 4, 8)), overwriting)(x.clone())
    for block, channels in ((IdentityResidualBlock, (4, 4, 16)), (ResidualBlock, (4, 4, 8)), (ResidualBlock, (4, 16))):
        outputs = []
        for norm_act in (InPlaceABN, overwriting):
            torch.manual_seed(0)
            outputs.append(block(Convolutions(8, channels), norm_act)(x.clone()))
            outputs[-1].sum().backward()
        assert torch.equal(*outputs)


POST_BUFFERS = [  # with 4, 4 and 16 channels: the bytes of norms' inputs or outputs, activations, and y
    (ABN, (4, 4, 16), [4, 4, 4, 4, 16, 16]),
    (InPlaceABN, (4, 4, 16), [4, 4, 16, 16]),
    (CheckpointedABN, (4, 4, 16), [4, 4, 16, 16]),
    (ABN, (16, 16), [16, 16, 16, 16]),
    (InPlaceABN, (16, 16), [16, 16, 16]),
]


@pytest.mark.parametrize("norm_act, channels, expected", POST_BUFFERS)
def test_what_a_post_activation_block_keeps(norm_act, channels, expected):
    """The first convolution keeps the input; the rest is 12C values with standard norms, 10C with in-place ones."""
    block = recompute_activations(ResidualBlock(Convolutions(16, channels), norm_act), checkpointed_only=True)
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    storages = kept_maps(block, x)
    assert storages.pop(x.untyped_storage()._cdata) == x.nbytes
    assert sorted(size * 16 // x.nbytes for size in storages.values()) == expected


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_of_the_norms_follows_the_sum_and_not_the_last_norm(activation):
    """Other tests compare the rest of the block with torchvision's and with the release's."""
    norm_act = partial(ABN, activation=activation, activation_param=0.3)
    block = ResidualBlock(Convolutions(8, (4, 4, 8)), norm_act).double()
    x = torch.randn(3, 8, 7, 6, dtype=torch.float64)
    expected = activate_(Activation(activation, 0.3), block.convs(x) + x)
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)
