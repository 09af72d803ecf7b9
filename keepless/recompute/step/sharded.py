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


def add_copies_without_fsdp2(network: nn.Module, mode: Any, memo: dict[int, Any]) -> list[tuple[nn.Module, nn.Module]]:
    """Add modules and parameters without FSDP2 to a memo of `copy.deepcopy`. Returns each sharded module with its copy.

    A copy is empty, and of the class that the module had before. Parameters have the dtype in which FSDP2 gathers them.
    """
    fsdp = sys.modules.get(_FSDP)
    sharded = [module for module in network.modules() if fsdp is not None and isinstance(module, fsdp.FSDPModule)]
    pairs: list[tuple[nn.Module, nn.Module]] = [(module, object.__new__(type(module).__mro__[2])) for module in sharded]
    memo |= {id(module): empty for module, empty in pairs}
    for module in sharded:  # inner ones last
        dtype = gathered_dtype(module)
        for parameter in module.parameters():
            if type(parameter.data) is not Tensor:  # the root's parameters may be gathered already
                with mode:
                    whole = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=parameter.device)
                memo[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
    return pairs


def attributes_without_fsdp2(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that FSDP2 has sharded, without FSDP2's state and hooks."""
    attributes = {name: value for name, value in vars(module).items() if "composable" not in str(name)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = attributes[name].items()
        attributes[name] = OrderedDict((key, hook) for key, hook in hooks if _FSDP not in hook.__module__)
    return attributes
