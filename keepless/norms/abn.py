"""Standard batch normalisation followed by an activation: strategy (a) of the paper's Figure 2."""

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..inputs import is_number
from ..torch_internals import FakeTensor, NormBase, backward_runs, without_function_modes
from .backends import backend_for, check_backend
from .backends.activations import Activation, check_activation
from .backends.interface import UNTRACKED, Running
from .bn_act import NormArguments, Strategy, norm_and_activation, statistics_dtype
from .released_weights import warn_if_released
from .synchronisation import check_group, refuse_jointly, synchronised_group


class LayerTensors(NamedTuple):
    """A layer's parameters and running statistics, (C,)."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None


class ABN(NormBase):
    """z = phi(gamma * (x - mean) / sqrt(var + eps) + beta), with mean and var of the minibatch per channel.

    The activation overwrites the normalised values, so two activation-sized buffers are saved for backward, x and z.
    Input and output: (N, C, *spatial), any memory format, float64, float32, bfloat16 or float16.
    Parameters and statistics: (C,), float32 (float64 for float64 inputs). Names as in `torch.nn.BatchNorm2d`.

    Args:
        num_features (C), eps, momentum, affine, track_running_stats: as in `torch.nn.BatchNorm2d`.
            gamma is `weight`, beta is `bias`.
        activation: leaky_relu, elu, identity, sigmoid, tanh or relu.
        activation_param: slope of leaky_relu for negative inputs, alpha of elu.
        learn_scale: False fixes gamma to 1 and learns beta only (section 3.3: a following convolution absorbs gamma).
        sync: compute minibatch statistics over all processes of `group`. Has no effect unless `torch.distributed` is
            initialised.
        group: process group; None is the default group.
        backend: "eager" (PyTorch's operators), "compiled" (TorchInductor), "triton" (fused CUDA kernels), or "auto".
            For this layer "auto" means "eager", unless it is synchronised. A fused backend computes the activation's
            derivative from x, so only operations that need z keep it. Inside `torch.compile` every backend leaves the
            fusion to the compiler.
    """

    invertible_activation = False
    weight: nn.Parameter | None  # type: ignore[assignment]

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
        sync: bool = False,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ):
        if num_features < 1:
            raise ValueError(f"num_features={num_features}: expected the number of channels, at least 1")
        if not (is_number(eps) and eps > 0):
            raise ValueError(f"eps={eps!r}: expected a number above 0, which is added to the variance")
        _check_momentum(momentum)
        check_group(group)
        check_activation(Activation(activation, activation_param), invertible=self.invertible_activation)
        check_backend(backend)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if track_running_stats:  # a fake tensor made by torch.tensor, as in PyTorch, cannot be copied
            self.num_batches_tracked = torch.zeros((), dtype=torch.long)
        if not learn_scale:
            self.weight = None
        self.activation = activation
        self.activation_param = activation_param
        self.learn_scale = learn_scale
        self.sync = sync
        self.group = group
        self.backend = backend

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate x.

        Raises:
            ValueError: x is not (N, num_features, *spatial), its dtype does not fit the parameters, or minibatch
                statistics are needed and it has a single value per channel. If a synchronised layer refuses one rank's
                input, or all ranks together have fewer than two values per channel, it raises on every rank. On a
                device, and inside `torch.compile`, the other ranks get a RuntimeError from an assertion instead.
        """
        tensors, minibatches = self._layer_tensors()
        use_batch = self.training or (tensors.running_mean is None and tensors.running_var is None)
        group = synchronised_group(self.group) if self.sync and use_batch else None
        is_alone = use_batch and group is None
        if is_alone and self.sync and isinstance(x, FakeTensor) and 0 < x.numel() <= self.num_features:
            return self.forward(torch.cat([x, x]))[:1]  # to plan a step in which other ranks have more values
        try:
            # Otherwise function modes, such as a recording, would see every attribute access.
            with nullcontext() if torch.compiler.is_compiling() else without_function_modes():
                self._check_input(x, tensors, is_alone)
            if use_batch:
                _check_momentum(self.momentum)  # perhaps it was set later
            if group is not None:
                backend_for(self.backend, x)  # raises before other ranks wait
        except ValueError:
            if group is not None:
                refuse_jointly(self.num_features, x.device, group)
            raise
        # An empty minibatch has no statistics. A backward pass repeats forward passes that have been counted
        # (`torch.utils.checkpoint`).
        is_tracked = self.track_running_stats and (group is not None or x.numel() > 0)
        is_counted = use_batch and is_tracked and (torch.compiler.is_compiling() or not backward_runs())
        running = self._running_statistics(tensors, is_counted) if is_tracked or not use_batch else UNTRACKED
        activation = Activation(self.activation, self.activation_param)
        arguments = NormArguments(use_batch, running.momentum, self.eps, activation, group)
        z = norm_and_activation(x, tensors.weight, tensors.bias, running.mean, running.var, arguments, self.strategy())
        if is_counted and running.mean is not None and minibatches is not None:
            minibatches.add_(1)
            if self.momentum is None:
                _add_to_average(tensors, running, minibatches)
        return z

    def _running_statistics(self, tensors: LayerTensors, is_counted: bool) -> Running:
        """The statistics that a call reads, or updates if it is counted.

        In training others get the statistics of the minibatch alone: for a cumulative average (`momentum` None), or
        because a repeated call must save what the first one has saved.
        """
        mean = tensors.running_mean
        var = tensors.running_var
        if mean is None or var is None:
            return UNTRACKED
        if not self.training:
            return Running(mean, var)
        if is_counted and self.momentum is not None:
            return Running(mean, var, self.momentum)
        return Running(torch.zeros_like(mean), torch.zeros_like(var), momentum=1.0)

    def _layer_tensors(self) -> tuple[LayerTensors, Tensor | None]:
        """Parameters and statistics, and the number of minibatches.

        Read from the module's dictionaries, because `Module.__getattr__` takes as long as a small operator.
        """
        parameters = self._parameters
        buffers = self._buffers
        try:
            statistics = (buffers["running_mean"], buffers["running_var"])
            return LayerTensors(parameters["weight"], parameters["bias"], *statistics), buffers["num_batches_tracked"]
        except KeyError:  # e.g. a parametrised weight
            statistics = (self.running_mean, self.running_var)
            return LayerTensors(self.weight, self.bias, *statistics), self.num_batches_tracked

    def strategy(self) -> Strategy:
        """How to compute z."""
        return Strategy(keep="x", backend=self.backend)

    def _check_input(self, x: Tensor, tensors: LayerTensors, is_alone: bool) -> None:
        """Raise the ValueErrors of `forward`. `is_alone`: minibatch statistics come from this process only."""
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}: expected (N, {self.num_features}, …)"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} got a {x.dtype} input: expected float64, float32, bfloat16 or float16"
            )
        expected_dtype = statistics_dtype(x)
        for values in tensors:
            if values is not None and values.dtype is not expected_dtype:
                name = next(name for name, tensor in tensors._asdict().items() if tensor is values)
                raise ValueError(
                    f"{type(self).__name__} got a {x.dtype} input, and its {name} is {values.dtype}: expected float64 "
                    f"parameters and buffers for float64 inputs and float32 otherwise; convert the network with "
                    f".double() or .float(), and use torch.autocast for training in half precision (with FSDP2, shard "
                    f"norms separately, without param_dtype)"
                )
        if is_alone and 0 < x.numel() <= self.num_features:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}: one value per channel has no variance "
                f"(a head's pooled branch gets this with one crop per device); train with at least two crops per "
                f"device, or call .eval() on this layer to use its running statistics"
            )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *lists: Any
    ) -> None:
        if self.weight is not None:
            warn_if_released(state_dict, prefix, local_metadata, missing_keys)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *lists)

    def __deepcopy__(self, memo: dict) -> "ABN":
        if self.group is not None:
            memo[id(self.group)] = self.group  # the copy shares the process group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        activation = f"activation={self.activation}({self.activation_param})"
        options = f"learn_scale={self.learn_scale}, sync={self.sync}, backend={self.backend}"
        return f"{super().extra_repr()}, {activation}, {options}"


def _check_momentum(momentum: float | None) -> None:
    """ValueError if a momentum is no weight. Compiled forward passes do not check it again."""
    if momentum is None or torch.compiler.is_compiling():
        return
    if not (is_number(momentum) and 0 <= momentum <= 1):
        raise ValueError(f"momentum={momentum!r}: expected 0 to 1, the weight of the newest minibatch, or None")


def _add_to_average(tensors: LayerTensors, of_minibatch: Running, minibatches: Tensor) -> None:
    """Add a minibatch's statistics to their cumulative average, over this number () of minibatches."""
    for running, new in zip(tensors[2:], of_minibatch[:2], strict=True):
        if running is not None and new is not None:
            running.lerp_(new, minibatches.to(running.dtype).reciprocal())  # a tensor: nothing waits for the device
