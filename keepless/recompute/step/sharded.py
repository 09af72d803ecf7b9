"""Networks whose parameters FSDP shards, and copies of them without FSDP."""

import sys
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_internals import ddp_around, gathered_dtype

_FSDP = "torch.distributed.fsdp"


def is_sharded(network: nn.Module) -> bool:
    """Whether FSDP shards parameters of a network, and so frees gathered parameters after each use."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None or not dist.is_initialized():
        return False
    return any(isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for module in network.modules())


def may_have_buckets() -> bool:
    """Whether parameters may get their gradients in memory that exists before: DDP's buckets, or what others have."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    around = ddp_around()
    return around is None or around.gradient_as_bucket_view


def without_fsdp2(network: nn.Module, mode: Any, memo: dict[int, Any]) -> list[tuple[nn.Module, nn.Module]]:
    """The modules that FSDP2 has sharded, each with an empty object of the class that it had before.

    Adds these objects to the memo, and whole parameters in the dtype in which FSDP2 gathers them.
    """
    fsdp = sys.modules.get(_FSDP)
    sharded = [one for one in network.modules() if fsdp is not None and isinstance(one, fsdp.FSDPModule)]
    found: list[tuple[nn.Module, nn.Module]]
    found = [(module, object.__new__(type(module).__mro__[2])) for module in sharded]
    memo |= {id(module): own for module, own in found}
    for module in sharded:  # inner ones last
        dtype = gathered_dtype(module)
        for one in module.parameters():
            if type(one.data) is not Tensor:  # the root's parameters may be gathered already
                with mode:
                    whole = torch.empty(one.shape, dtype=dtype or one.dtype, device=one.device)
                memo[id(one)] = nn.Parameter(whole, one.requires_grad)
    return found


def own_contents(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that FSDP2 has sharded, without FSDP2's state and hooks."""
    hooks = "_forward_hooks", "_forward_pre_hooks"
    own = {name: one for name, one in vars(module).items() if "composable" not in str(name)}
    for name in hooks:
        own[name] = OrderedDict((key, hook) for key, hook in own[name].items() if _FSDP not in hook.__module__)
    return own
