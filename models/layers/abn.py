"""Batch normalisation followed by an activation, the standard way: strategy (a) of the paper's Figure 2."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import activate_, check_activation


class ABN(nn.Module):
    """z = phi(gamma * (x - mean) / sqrt(var + eps) + beta), with mean and var of the minibatch per channel.

    The activation overwrites the normalised values, so the backward pass keeps two activation-sized buffers, x and z.
    Input and output: (N, C, *spatial), any memory format, float64, float32, bfloat16 or float16.
    Parameters and statistics: (C,), float32 (float64 for float64 inputs). Names as in `torch.nn.BatchNorm2d`.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new minibatch in the running statistics; None averages over all minibatches.
        affine: learn gamma (`weight`) and beta (`bias`).
        track_running_stats: keep running statistics and use them in eval mode; otherwise always use the minibatch's.
        activation: leaky_relu, elu, identity or relu.
        activation_param: slope of leaky_relu for negative inputs, alpha of elu.
        learn_scale: False fixes gamma to 1 and learns beta only (section 3.3: a following convolution absorbs gamma).
    """

    _version = 2  # as torch.nn.BatchNorm2d: state dicts below 2 have no num_batches_tracked
    invertible_activation = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        learn_scale: bool = True,
    ):
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features={num_features}: expected the number of channels, at least 1")
        check_activation(activation, activation_param, invertible=self.invertible_activation)
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.activation = activation
        self.activation_param = activation_param
        self.learn_scale = learn_scale
        self.register_parameter("weight", nn.Parameter(torch.empty(num_features)) if affine and learn_scale else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(num_features)) if affine else None)
        self.register_buffer("running_mean", torch.empty(num_features) if track_running_stats else None)
        self.register_buffer("running_var", torch.empty(num_features) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.long) if track_running_stats else None)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        if self.track_running_stats:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def uses_batch_statistics(self) -> bool:
        return self.training or not self.track_running_stats

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate x.

        Raises:
            ValueError: x is not (N, num_features, *spatial), has a dtype that the parameters do not fit, or has a
                single value per channel where minibatch statistics are needed.
        """
        self.check_input(x)
        running_mean, running_var, momentum = self.update_plan()
        y = F.batch_norm(
            x, running_mean, running_var, self.weight, self.bias, self.uses_batch_statistics, momentum, self.eps
        )
        return activate_(self.activation, self.activation_param, y)

    def check_input(self, x: Tensor) -> None:
        """Raise the ValueErrors of `forward`."""
        name = type(self).__name__
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"{name} got an input of shape {tuple(x.shape)}: expected (N, {self.num_features}, …)")
        statistics = self.running_mean if self.running_mean is not None else self.bias
        if statistics is not None and statistics.dtype != torch.promote_types(x.dtype, torch.float32):
            raise ValueError(
                f"{name} got a {x.dtype} input and {statistics.dtype} parameters: expected float64 parameters for "
                f"float64 inputs and float32 parameters otherwise; convert the network with .double() or .float(), "
                f"and use torch.autocast for training in half precision"
            )
        if self.uses_batch_statistics and x.numel() <= self.num_features:
            raise ValueError(
                f"{name} got an input of shape {tuple(x.shape)}, one value per channel, whose variance is not defined "
                f"(the pooled branch of a head sees this with one crop per device): train with at least two crops "
                f"per device, or call .eval() on this layer to use its running statistics"
            )

    def update_plan(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Count the minibatch; return the running mean and variance to read or update, and the momentum to use."""
        if not self.track_running_stats:
            return None, None, 0.0
        if self.training:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / max(int(self.num_batches_tracked), 1)
        return self.running_mean, self.running_var, momentum

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        # Checkpoints of the released package's first version carry no num_batches_tracked: keep our own count.
        key = prefix + "num_batches_tracked"
        added = self.track_running_stats and local_metadata.get("version", 1) < 2 and key not in state_dict
        if added:
            state_dict[key] = self.num_batches_tracked
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if added:
            del state_dict[key]

    def extra_repr(self) -> str:
        parts = [f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, activation={self.activation}"]
        if self.activation in ("leaky_relu", "elu"):
            parts[0] += f"({self.activation_param})"
        parts += [
            f"{flag}=False" for flag in ("affine", "track_running_stats", "learn_scale") if not getattr(self, flag)
        ]
        return ", ".join(parts)
