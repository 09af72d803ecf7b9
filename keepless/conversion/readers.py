"""A symbolic trace of a network, which shows what reads the output of each norm."""

import inspect
import operator
import warnings
from collections import defaultdict
from typing import TypeAlias

import torch
from torch import fx, nn

from ..norms.abn import ABN
from ..norms.statistics import state_kept
from ..torch_internals import BatchNormBase
from .activated import activation_of, is_customised

KINDS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {  # norms, and convolutions of as many dimensions
    nn.BatchNorm1d: (nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}
CONVOLUTIONS = tuple(conv for kinds in KINDS.values() for conv in kinds)
Calls: TypeAlias = "list[tuple[fx.Node, dict[str, nn.Module]]]"  # of a norm, in traces of modules with these names
IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem".split()  # functions of `operator`


class _Value(fx.Proxy):
    """Records operators in place, too; a plain proxy records `x += y` like `x + y`."""


for _operator in IN_PLACE:
    _function = getattr(operator, _operator)
    setattr(
        _Value, f"__{_operator}__", lambda x, *y, f=_function: x.tracer.create_proxy("call_function", f, (x, *y), {})
    )


class _Tracer(fx.Tracer):
    """Looks into modules with children, but not into layers; with `shallow` only at the root's own calls."""

    def __init__(self, shallow: bool):
        super().__init__()
        self.shallow = shallow

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        return self.shallow or not module._modules or isinstance(module, (BatchNormBase, ABN, *CONVOLUTIONS))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


def traced_calls(network: nn.Module) -> tuple[dict[nn.Module, Calls], str]:
    """The calls of a network's norms in both modes, with its arguments' defaults; and why it cannot be traced, or "".

    If it cannot be traced, the calls are those by each nn.Sequential. Buffers and attributes do not change.
    """
    if isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return traced_calls(network.module)
    error = ""
    with state_kept(network.modules()), torch.random.fork_rng([]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graphs = _graphs_of_both_modes(network)
        except Exception as raised:  # a network may raise anything
            error = f"{type(raised).__name__}: {str(raised).partition('. ')[0]}"
            sequences = [module for module in network.modules() if runs_in_order(module)]
            graphs = [(sequence, _Tracer(shallow=True).trace(sequence)) for sequence in sequences]
    calls: dict[nn.Module, Calls] = defaultdict(list)
    for root, graph in graphs:
        modules = dict(root.named_modules())
        for node in graph.nodes:
            if node.op == "call_module":
                calls[modules[str(node.target)]].append((node, modules))
    return calls, error


def _graphs_of_both_modes(network: nn.Module) -> list[tuple[nn.Module, fx.Graph]]:
    """The network with the graph of its training mode, and of eval mode, in which it then is."""
    if "forward" in vars(network):  # a tracer looks at the class
        raise ValueError("its forward pass was replaced")
    parameters = inspect.signature(network.forward).parameters.values()
    optional = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    defaults = {parameter.name: parameter.default for parameter in optional}
    return [(network, _Tracer(shallow=False).trace(network.train(training), defaults)) for training in (True, False)]


def runs_in_order(module: nn.Module) -> bool:
    """Whether a module is an nn.Sequential that calls its children one after the other."""
    is_plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_plain and "forward" not in vars(module)


def activation_after(norm: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The activation that alone reads the output of a norm; None if a convolution reads it.

    ValueError: neither does, or other code overwrites what an in-place layer keeps.
    """
    output = _behind_identities(norm, modules)
    only_user = _only_user(output)
    activation = None if only_user is None else _module(only_user, modules)
    if only_user is not None and activation is not None and activation_of(activation) is not None:
        check_not_overwritten(only_user, modules)
        return activation
    if not any(isinstance(_module(user, modules), CONVOLUTIONS) for user in output.users):
        names = ", ".join(_name(user, modules) for user in output.users) or "nothing"
        raise ValueError(f"its output goes to {names}: expected an activation module alone, or a convolution")
    check_not_overwritten(output, modules)
    return None


def _behind_identities(output: fx.Node, modules: dict[str, nn.Module]) -> fx.Node:
    """The output, or the result of the last of the nn.Identity modules that alone read it one after the other."""
    user = _only_user(output)
    module = None if user is None else _module(user, modules)
    if user is None or type(module) is not nn.Identity or is_customised(module):
        return output
    return _behind_identities(user, modules)


def _only_user(output: fx.Node) -> fx.Node | None:
    """The call that alone reads an output, and has no other argument; None if there is none."""
    if len(output.users) != 1:
        return None
    (user,) = output.users
    return user if user.args == (output,) and not user.kwargs else None


def check_not_overwritten(output: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Raise ValueError if the code that reads an output which an in-place layer keeps writes over it."""
    kept = _behind_identities(output, modules)
    for user in kept.users:
        name = _name(user, modules)
        is_inplace = user.kwargs.get("inplace") or getattr(_module(user, modules), "inplace", False)
        if user.args[:1] == (kept,) and (is_inplace or name.endswith("_") or name in IN_PLACE):
            raise ValueError(f"{name} overwrites the output, which an in-place layer keeps: write x = x + y there")


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules[str(node.target)] if node.op == "call_module" else None


def _name(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    if node.op == "output":
        return "the caller"
    module = _module(node, modules)
    return getattr(node.target, "__name__", str(node.target)) if module is None else type(module).__name__
