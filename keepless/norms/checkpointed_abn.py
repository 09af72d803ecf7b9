"""Checkpointed batch normalisation and activation: strategies (b) and (c) of the paper's Figure 2."""

from typing import Literal

import torch.distributed as dist

from .abn import ABN
from .bn_act import Strategy


class CheckpointedABN(ABN):
    """`ABN` that saves x (strategy b) or x_hat (strategy c) for backward, and recomputes z from it.

    Later operations need z in their own backward passes and save it, unless `recompute_activations` has prepared the
    network (`norm=checkpoint` does that). Then z is recomputed when the first of them needs it, and only one
    activation-sized buffer is saved. Any activation works.

    Under `torch.autocast` z must have the precision in which the following convolution computes, or the convolution
    saves a converted copy. If x comes from a convolution, z has that precision.

    Args (in addition to `ABN`):
        store: "x" to recompute batch normalisation (with the forward pass's statistics) and the activation, or "x_hat"
            to recompute the scale and shift and the activation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        store: Literal["x", "x_hat"] = "x",
        learn_scale: bool = True,
        *,
        sync: bool = False,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ):
        abn_arguments = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(*abn_arguments, learn_scale=learn_scale, sync=sync, group=group, backend=backend)
        if store not in ("x", "x_hat"):
            raise ValueError(f"store={store!r}: expected 'x' or 'x_hat'")
        self.store = store

    def strategy(self) -> Strategy:
        return Strategy(keep=self.store, recompute_output=True, backend=self.backend)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", store={self.store}"
