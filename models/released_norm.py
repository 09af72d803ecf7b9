"""The layer of the released `inplace_abn` as a norm of our networks (norm=package)."""

from functools import cache
from typing import Any

from torch import Tensor, nn

RELEASED_ACTIVATIONS = ("leaky_relu", "elu", "identity")


def released_norm(channels: int, **options: Any) -> nn.Module:
    """The released layer. ValueError: see `released_abn`."""
    return released_abn()(channels, **options)


@cache
def released_abn() -> type[nn.Module]:
    """The released InPlaceABN, adapted to work anywhere in a network.

    It overwrites its input, which residual blocks need for their shortcut, so it gets a copy; the bytes saved for the
    backward pass are the same. Its scale is |weight| + eps, so the sign of a weight has no effect. It supports float32
    and float64. The released synchronised layer is not offered: version 1.1.0 silently does not synchronise over the
    default group.

    ValueError if `inplace_abn` is not installed or fails to load.
    """
    try:
        from inplace_abn import InPlaceABN
    except ImportError as error:
        raise ValueError(
            f"norm=package needs the released inplace_abn ({error}): build it against the installed PyTorch, with a "
            f"compiler and the toolkit for CUDA, by `pip install setuptools-scm` and "
            f"`pip install --no-build-isolation inplace-abn`; or use norm=inplace, which needs no package"
        ) from error

    class ReleasedABN(InPlaceABN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    return ReleasedABN
