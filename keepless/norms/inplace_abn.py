"""In-place activated batch normalisation, variants I and II: strategies (d) and (e) of the paper's Figure 2."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from ..inputs import Network, check_module, is_number
from ..torch_internals import InstanceNormBase
from .abn import ABN
from .bn_act import Strategy
from .checkpointed_abn import CheckpointedABN
from .conversion_report import ConversionReport, log_report
from .synchronisation import check_group


class InPlaceABN(ABN):
    """`ABN` that saves only its output z (and O(C) values) for backward.

    The backward pass inverts the activation: y = phi^-1(z). Variant I also recovers x_hat = (y - beta) / gamma for
    every value; variant II folds this inversion into per-channel constants. A following convolution saves z anyway, so
    the layer itself costs no memory.

    z is a new buffer: the preceding operation does not save its output x, so overwriting x would not save memory.

    With minibatch statistics the scale is gamma = copysign(max(|weight|, gamma_floor), weight), which can be inverted,
    and dL/dweight = dL/dgamma, so a zero weight can recover. With running statistics the layer is exactly batch
    normalisation with the raw weight followed by the activation, except that dL/dweight of channels with
    |weight| < gamma_floor is scaled by |weight| / gamma_floor.

    Args (in addition to `ABN`):
        variant: "I" or "II"; same results. II saves one pass in the eager backend; fused backends compute both alike.
        gamma_floor: smallest |gamma| in training.
        overwrite_input: write z over x, which saves one temporary buffer in the forward pass. For a block that owns x,
            directly after a convolution: as with any in-place operation, later consumers see the new values, and
            the backward pass raises if an earlier operation saved x. An x that is neither contiguous nor channels_last
            still needs the buffer, and another one in the backward pass. If x is a leaf that requires a gradient, or a
            view made by `chunk` or `split`, PyTorch raises after x was overwritten.
    """

    invertible_activation = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        variant: str = "II",
        learn_scale: bool = True,
        gamma_floor: float = 1e-5,
        overwrite_input: bool = False,
        *,
        sync: bool = False,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ):
        abn_arguments = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(*abn_arguments, learn_scale=learn_scale, sync=sync, group=group, backend=backend)
        if variant not in ("I", "II"):
            raise ValueError(f"variant={variant!r}: expected 'I' or 'II'")
        if not (is_number(gamma_floor) and gamma_floor > 0):
            raise ValueError(f"gamma_floor={gamma_floor!r}: expected a number above 0 (gamma is a divisor)")
        self.variant = variant
        self.gamma_floor = gamma_floor
        self.overwrite_input = overwrite_input

    def strategy(self) -> Strategy:
        return Strategy(
            keep="z",
            recover_x_hat=self.variant == "I",
            gamma_floor=self.gamma_floor,
            overwrite_input=self.overwrite_input,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + f", variant={self.variant}"


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with sync=True: minibatch statistics over all processes of `group`."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        group: dist.ProcessGroup | None = None,
        variant: str = "II",
        learn_scale: bool = True,
        gamma_floor: float = 1e-5,
        overwrite_input: bool = False,
        *,
        backend: str = "auto",
    ):
        abn_arguments = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        inplace_arguments = (variant, learn_scale, gamma_floor, overwrite_input)
        super().__init__(*abn_arguments, *inplace_arguments, sync=True, group=group, backend=backend)

    @staticmethod
    def convert(
        module: Network,
        group: dist.ProcessGroup | None = None,
        *,
        report: Callable[[ConversionReport], object] = log_report,
    ) -> Network:
        """Synchronise all our layers in a network, or a single layer; return it.

        Layers stay the same objects with the same parameters; already synchronised ones switch to `group`. Convert
        PyTorch's batch normalisations with `to_inplace` first.

        Args:
            group: process group; None is the default group.
            report: called with the `ConversionReport`, e.g. `print`. By default the report is logged, as a warning if
                it lists norms that were not converted.
        """
        check_module(module, "InPlaceABNSync.convert")
        check_group(group)
        conversion = ConversionReport()
        for name, layer in module.named_modules():
            if isinstance(layer, ABN):
                previous = f"{type(layer).__name__}({layer.activation})"
                if type(layer) is InPlaceABN:  # a subclass keeps its own methods
                    layer.__class__ = InPlaceABNSync
                layer.sync = True
                layer.group = group
                conversion.replaced[name] = f"{previous} -> {type(layer).__name__}({layer.activation}, sync=True)"
            elif isinstance(layer, nn.SyncBatchNorm):
                conversion.kept[name] = "SyncBatchNorm: it is synchronised over its own process_group"
            elif "running_mean" in layer._buffers and not isinstance(layer, InstanceNormBase):
                conversion.kept[name] = (
                    f"{type(layer).__name__}: not a layer of this package; use to_inplace first, or "
                    f"nn.SyncBatchNorm.convert_sync_batchnorm"
                )
        report(conversion)
        return module


OWN_LAYERS = (ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync)
