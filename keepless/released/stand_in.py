"""Stand in for the released package `inplace_abn`, for programs that import it."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from ..norms import abn
from ..norms import inplace_abn as in_place
from ..norms.abn import Own
from ..norms.bn_act import Strategy
from ..norms.released_weights import CONVERTED
from .functional import inplace_abn, inplace_abn_sync, released_scale

_NAME = "inplace_abn"


def stand_in_for_inplace_abn() -> None:
    """Make `import inplace_abn`, `inplace_abn.functions` and `inplace_abn.group` find this package.

    Layers and functions then scale by |weight| + eps, as the released ones do, so checkpoints need no conversion. Call
    it before anything, such as timm, imports the package.

    RuntimeError: the released package is installed, or another one has been imported under its name.
    """
    present = sys.modules.get(_NAME)
    if getattr(present, "stands_in", False):
        return
    if present is not None:
        raise RuntimeError("inplace_abn has already been imported: call stand_in_for_inplace_abn() before that")
    if importlib.util.find_spec(_NAME) is not None:
        raise RuntimeError("the released inplace_abn is installed: leave this call out, or pip uninstall inplace-abn")
    layers: dict[str, object] = {"ABN": ABN, "InPlaceABN": InPlaceABN, "InPlaceABNSync": InPlaceABNSync}
    contents: dict[str, dict[str, object]] = {
        _NAME: {**layers, "active_group": active_group, "set_active_group": set_active_group, "stands_in": True},
        f"{_NAME}.abn": layers,
        f"{_NAME}.functions": {"inplace_abn": inplace_abn, "inplace_abn_sync": inplace_abn_sync},
        f"{_NAME}.group": {"active_group": active_group, "set_active_group": set_active_group},
    }
    for name, content in contents.items():
        module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=name == _NAME))
        vars(module).update(content)
        sys.modules[name] = module
        if name != _NAME:
            setattr(sys.modules[_NAME], name.removeprefix(f"{_NAME}."), module)


class ABN(abn.ABN):
    """The released base class: standard batch normalisation and activation, scaled by the weight itself."""

    _version = 1  # of its state dict: as in the release, without num_batches_tracked

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # The file and this layer use the same scale.
        metadata = {**local_metadata, CONVERTED: True, "version": self._version}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "num_batches_tracked", None)  # the release has none


class InPlaceABN(in_place.InPlaceABN, ABN):
    """The released layer: keeps its output alone, and scales by |weight| + eps."""

    def strategy(self) -> Strategy:
        return super().strategy()._replace(gamma_floor=0.0)  # eps is the floor

    def training_scale(self, weight: Tensor) -> Tensor:
        return released_scale(weight, self.eps)

    def _own(self) -> tuple[Own, Tensor | None]:
        own, minibatches = super()._own()
        return own if own.weight is None else own._replace(weight=self.training_scale(own.weight)), minibatches


class InPlaceABNSync(in_place.InPlaceABNSync, InPlaceABN):
    """`InPlaceABN` with the minibatch statistics of all processes of a group; None: the default group."""

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        self.group = group


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def active_group(active: bool, process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A group of those processes of `process_group` that are `active`. Every process must call it.

    ValueError: no process is active.
    """
    members: list[int | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(members, dist.get_rank() if active else None, process_group)
    ranks = tuple(rank for rank in members if rank is not None)
    if not ranks:
        raise ValueError("active_group: no process is active")
    assert dist.group.WORLD is not None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks))
    return groups[ranks]


def set_active_group(network: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Call `set_group(group)` on every module that has this method, as each `InPlaceABNSync` does."""
    for module in network.modules():
        if callable(set_group := getattr(module, "set_group", None)):
            set_group(group)
