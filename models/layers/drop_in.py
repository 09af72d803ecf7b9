"""Stand in for the released package `inplace_abn`, for programs that import it."""

import importlib.util
import sys
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .norms.activations import Activation, activate_
from .norms.functional import inplace_abn, inplace_abn_sync

_NAME = "inplace_abn"


def stand_in_for_inplace_abn() -> None:
    """Make `import inplace_abn`, `inplace_abn.functions` and `inplace_abn.group` find this package.

    Layers and functions then scale by |weight| + eps, as the released ones, so checkpoints stay as they are. Call it
    before anything imports the package, such as timm.

    RuntimeError: the released package is installed, or another one has been imported under its name.
    """
    present = sys.modules.get(_NAME)
    if getattr(present, "stands_in", False):
        return
    if present is not None:
        raise RuntimeError("inplace_abn has been imported already: call stand_in_for_inplace_abn() before that")
    if importlib.util.find_spec(_NAME) is not None:
        raise RuntimeError("the released inplace_abn is installed: leave this call out, or pip uninstall inplace-abn")
    layers: dict[str, object] = {"ABN": ABN, "InPlaceABN": InPlaceABN, "InPlaceABNSync": InPlaceABNSync}
    contents: dict[str, dict[str, object]] = {
        _NAME: {**layers, "active_group": active_group, "set_active_group": set_active_group, "stands_in": True},
        f"{_NAME}.abn": layers,
        f"{_NAME}.functions": {"inplace_abn": inplace_abn, "inplace_abn_sync": inplace_abn_sync},
        f"{_NAME}.group": {"active_group": active_group, "set_active_group": set_active_group},
    }
    package = None
    for name, content in contents.items():
        module = ModuleType(name, f"keepless in the place of {name}")
        vars(module).update(content)
        sys.modules[name] = module
        if package is None:
            package = module
            package.__path__ = []  # it has modules
        else:
            setattr(package, name.removeprefix(f"{_NAME}."), module)


class ABN(nn.Module):
    """The released base class: standard batch normalisation and activation, scaled by the weight itself.

    Args and shapes as for `keepless.ABN`; state dicts have no num_batches_tracked.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
    ):
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.activation = activation
        self.activation_param = activation_param
        self.register_parameter("weight", nn.Parameter(torch.ones(num_features)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_features)) if affine else None)
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        y = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return activate_(Activation(self.activation, self.activation_param), y)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"activation={self.activation}[{self.activation_param}]"
        )


_Arguments = tuple[nn.Parameter | None, nn.Parameter | None, Tensor, Tensor, bool, float, float, str, float]


class InPlaceABN(ABN):
    """The released layer: keeps its output alone, and scales by |weight| + eps."""

    def forward(self, x: Tensor) -> Tensor:
        return inplace_abn(x, *self._arguments())

    def _arguments(self) -> _Arguments:
        statistics = self.running_mean, self.running_var
        how = self.training, self.momentum, self.eps, self.activation, self.activation_param
        return self.weight, self.bias, *statistics, *how


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with the minibatch statistics of all processes of a group; None: the default group."""

    group: dist.ProcessGroup | None = None

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return inplace_abn_sync(x, *self._arguments(), self.group)


_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def active_group(active: bool, process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The group of the processes of `process_group` that are `active`. Every process must call it.

    ValueError: none is.
    """
    members: list[int | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(members, dist.get_rank() if active else None, process_group)
    ranks = tuple(rank for rank in members if rank is not None)
    if not ranks:
        raise ValueError("active_group: no process is active")
    if ranks not in _GROUPS:
        _GROUPS[ranks] = dist.new_group(list(ranks))
    return _GROUPS[ranks]


def set_active_group(network: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Synchronise every `InPlaceABNSync` of a network over `group`."""
    for module in network.modules():
        if isinstance(module, InPlaceABNSync):
            module.set_group(group)
