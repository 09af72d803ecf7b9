"""The released `inplace_abn` package as a norm of our networks."""

from functools import cache

from torch import Tensor, nn

PACKAGE_ACTIVATIONS = ("leaky_relu", "elu", "identity")


@cache
def package_abn() -> type[nn.Module]:
    """The package's InPlaceABN, made to fit every place of a network.

    It writes over its input, which residual blocks need for their shortcut, so it is given a copy: the bytes kept for
    the backward pass are the same. Its scale is |weight| + eps: the sign of a weight has no meaning in it. It computes
    in float32 and float64. Its synchronised layer is not offered: version 1.1.0 silently does not synchronise with
    the default group.

    Raises:
        ValueError: the package is not installed, or does not load.
    """
    try:
        from inplace_abn import InPlaceABN
    except ImportError as error:
        raise ValueError(
            f"norm=package needs the released inplace_abn package ({error}): build it against the installed PyTorch "
            f"with `pip install --no-build-isolation inplace-abn` (a compiler, and for CUDA its toolkit, are needed), "
            f"or use norm=inplace, which needs nothing"
        ) from error

    class PackageABN(InPlaceABN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    return PackageABN
