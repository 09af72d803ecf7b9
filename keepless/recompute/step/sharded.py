"""Networks whose parameters FSDP shards, and copies of them without FSDP."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_internals import ddp_around, gathered_dtype


def is_sharded(network: nn.Module) -> bool:
    """Whether FSDP shards parameters of a network, and so frees gathered parameters after each use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_initialized():
        return False
    return any(isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for module in network.modules())


def has_distributed_tensors(network: nn.Module) -> bool:
    """Whether a network has parameters that are a `DTensor` without FSDP2, as tensor parallelism makes them."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    of_fsdp = {one for module in network.modules() if isinstance(module, fsdp) for one in module.parameters()}
    return any(isinstance(one, kind) and one not in of_fsdp for one in network.parameters())


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
    fsdp = sys.modules.get("torch.distributed.fsdp")
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
