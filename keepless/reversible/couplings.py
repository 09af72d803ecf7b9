"""Couplings: invertible layers around any two modules (RevNet, equations 6 to 8; MemCNN, equations 1 and 2)."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..inputs import check_module
from ..recompute.passes.recording import RUN_AGAIN

Halves = tuple[Tensor, ...]  # two tensors

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


class HalfStep(NamedTuple):
    """One of the two updates of a coupling: halves[target] = combine(halves[target], branch(halves[1 - target])).

    `undo` is the inverse of `combine` in its first argument. `combine_saves`: whether autograd saves tensors for it.
    """

    branch: nn.Module
    target: int
    combine: Callable[[Tensor, Any], Tensor]
    undo: Callable[[Tensor, Any], Tensor]
    combine_saves: bool

    def inverted(self) -> "HalfStep":
        """The update that undoes this one; the branch's input is the same."""
        return self._replace(combine=self.undo, undo=self.combine)

    def run(self, halves: Halves) -> Halves:
        """Return the updated halves. ValueError: see `branch_output`."""
        return self.with_target(halves, self.combine(halves[self.target], self.branch_output(halves)))

    def branch_output(self, halves: Halves) -> Any:
        """The branch's output. ValueError if it does not fit the other half, or the branch wrote over its input."""
        x = halves[1 - self.target]
        output = call_without_writes(self.branch, (x,))
        parts = output if isinstance(output, tuple) else (output,)
        expected_shape = halves[self.target].shape
        if not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(
                f"{type(self.branch).__name__} returned a {type(output).__name__}: a coupling needs a branch that "
                f"returns a tensor, or a tuple of tensors"
            )
        if any(part.shape != expected_shape for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"{type(self.branch).__name__} returned the shape {shapes} for an input of shape {tuple(x.shape)}; a "
                f"coupling needs a branch that returns the other half's shape, {tuple(expected_shape)}"
            )
        return output

    def with_target(self, halves: Halves, values: Tensor) -> Halves:
        """The halves with other values in the target."""
        return (values, halves[1]) if self.target == 0 else (halves[0], values)


class Coupling(nn.Module):
    """Base class of couplings: y1 = combine(x1, Fm(x2)); y2 = combine(x2, Gm(y1)), with x split in two halves.

    Subclasses define `combine` and `undo`. One that overrides more is reversed like other modules (`runs_in_halves`).

    Args:
        Fm: any module that returns what `combine` takes.
        Gm: another such module; None copies Fm, with its own parameters.
        split_dim: dimension along which the input is split and the output concatenated; not 0, the batch.
    """

    combine_saves = True
    invertible = True  # a subclass may have instances that are not

    def __init__(self, Fm: nn.Module, Gm: nn.Module | None = None, *, split_dim: int = 1):
        super().__init__()
        for branch in (Fm,) if Gm is None else (Fm, Gm):
            check_module(branch, type(self).__name__)
        self.Fm = Fm
        self.Gm = copy.deepcopy(Fm) if Gm is None else Gm
        self.split_dim = split_dim

    @staticmethod
    def combine(x: Tensor, output: Any) -> Tensor:
        """One half of y, from the same half of x and a branch's output."""
        raise NotImplementedError

    @staticmethod
    def undo(y: Tensor, output: Any) -> Tensor:
        """The inverse of `combine` in its first argument."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x -> y of the same shape. ValueError if the input cannot be halved or a branch does not fit."""
        return self.join(self.couple(*self.split(x)))

    def couple(self, x1: Tensor, x2: Tensor) -> Halves:
        """`forward` on halves."""
        halves: Halves = (x1, x2)
        for half in self.half_steps():
            halves = half.run(halves)
        return halves

    def inverse(self, y: Tensor) -> Tensor:
        """y -> x, up to rounding. ValueError as from `forward`, or if this coupling has no inverse."""
        if not self.invertible:
            raise ValueError(f"this {type(self).__name__} changes the size of its input, so it has no inverse")
        halves = self.split(y)
        for half in reversed(self.half_steps()):
            halves = half.inverted().run(halves)
        return self.join(halves)

    def half_steps(self) -> tuple[HalfStep, HalfStep]:
        """The two updates, in order."""
        update = (self.combine, self.undo, self.combine_saves)
        return HalfStep(self.Fm, 0, *update), HalfStep(self.Gm, 1, *update)

    def split(self, x: Tensor) -> Halves:
        """Two halves of x: views, or copies if x is channels_last, because half of its channels would not be.

        ValueError if they would differ in size, or x has no such dimension.
        """
        dim = self.split_dim
        if not -x.dim() <= dim < x.dim() or dim % x.dim() == 0:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)} and split_dim={dim}: expected a "
                f"dimension of the input other than the first, the batch"
            )
        if x.shape[dim] % 2:
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}: dimension {dim} has the odd size "
                f"{x.shape[dim]} and cannot be halved; expected an even one"
            )
        first, second = x.chunk(2, dim)
        memory_format = _CHANNELS_LAST.get(x.dim())
        if memory_format and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return first.contiguous(memory_format=memory_format), second.contiguous(memory_format=memory_format)
        return first, second

    def join(self, halves: Halves) -> Tensor:
        """The inverse of `split`."""
        return torch.cat(halves, self.split_dim)

    def extra_repr(self) -> str:
        return f"split_dim={self.split_dim}"


RUN_AGAIN.append(Coupling)


class AdditiveCoupling(Coupling):
    """y1 = x1 + Fm(x2); y2 = x2 + Gm(y1) (RevNet, equation 7; MemCNN, equation 1).

    Arguments as in `Coupling`. A half and the output of its branch may differ in dtype; y has the wider one.
    """

    combine_saves = False

    @staticmethod
    def combine(x: Tensor, output: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise ValueError(f"AdditiveCoupling got a {type(output).__name__} from a branch: expected one tensor")
        return x + output

    @staticmethod
    def undo(y: Tensor, output: Tensor) -> Tensor:
        return y - output


class AffineCoupling(Coupling):
    """y1 = s * x1 + t with (s, t) = Fm(x2); y2 = s' * x2 + t' with (s', t') = Gm(y1) (Dinh et al. 2017, equation 7).

    Args:
        Fm, Gm, split_dim: as in `Coupling`; with an adapter, branches return one tensor.
        adapter: wraps such a branch in a module that returns (s, t), e.g. `AffineAdapterNaive`. None: Fm and Gm return
            tuples (s, t) themselves.
    """

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        adapter: Callable[[nn.Module], nn.Module] | None = None,
        *,
        split_dim: int = 1,
    ):
        super().__init__(Fm, Gm, split_dim=split_dim)
        if adapter is not None:
            self.Fm = adapter(self.Fm)
            self.Gm = adapter(self.Gm)

    @staticmethod
    def combine(x: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise ValueError(
                f"AffineCoupling got a {type(output).__name__} from a branch: expected a tuple (scale, shift); give "
                f"adapter=AffineAdapterNaive or AffineAdapterSigmoid for modules with a single output"
            )
        scale, shift = output
        return x * scale + shift

    @staticmethod
    def undo(y: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        scale, shift = output
        return (y - shift) / scale


def create_coupling(
    Fm: nn.Module,
    Gm: nn.Module | None = None,
    coupling: str = "additive",
    *,
    adapter: Callable[[nn.Module], nn.Module] | None = None,
    split_dim: int = 1,
) -> Coupling:
    """An `AdditiveCoupling` ("additive") or an `AffineCoupling` ("affine"). Only the latter may have an adapter.

    ValueError: another name, or an adapter for an additive coupling.
    """
    if coupling == "affine":
        return AffineCoupling(Fm, Gm, adapter, split_dim=split_dim)
    if coupling != "additive" or adapter is not None:
        arguments = f"coupling={coupling!r}" + (" with an adapter" if adapter is not None else "")
        raise ValueError(f"{arguments}: expected 'additive', or 'affine', which may have an adapter")
    return AdditiveCoupling(Fm, Gm, split_dim=split_dim)


def runs_in_halves(module: object) -> TypeGuard[Coupling]:
    """Whether a module is a coupling that may run as `couple`, on halves, or as its half-steps if it is invertible.

    Not if a subclass overrides other methods, or if the module has hooks, which would not run. A subclass may override
    `couple` if it agrees with `half_steps`, and itself defines the attribute `couples_in_half_steps` to say so.
    """
    if not isinstance(module, Coupling) or has_hooks(module):
        return False
    kind = type(module)
    methods = ["forward", "inverse", "split", "join", "half_steps"]
    if "couples_in_half_steps" not in vars(kind):
        methods.append("couple")
    return "forward" not in vars(module) and all(getattr(kind, name) is getattr(Coupling, name) for name in methods)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def widened(x: Tensor) -> Tensor:
    """x as float32, if it has low precision under autocast: the sums of many couplings would add up its rounding."""
    return x.float() if is_low_under_autocast(x) else x


def is_low_under_autocast(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type)


def call_without_writes(function: Callable, values: tuple[Tensor, ...]) -> Any:
    """Call a function. ValueError if it wrote over its input, which the backward pass still needs."""
    versions = _versions(values)
    outputs = function(*values)
    if _versions(values) != versions:
        raise ValueError(
            f"{getattr(function, '__qualname__', type(function).__name__)} wrote over its input, which a reversible "
            f"module still needs: begin it with an operation that is not inplace"
        )
    return outputs


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """The number of in-place writes to each tensor; -1 for inference tensors (not counted); [] in torch.compile."""
    if torch.compiler.is_compiling():
        return []
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def detached(output: Any) -> Any:
    """The output of a branch, without its graph."""
    return tuple(part.detach() for part in output) if isinstance(output, tuple) else output.detach()


class AffineAdapterNaive(nn.Module):
    """s = exp(f(x)), t = f(x), with `module` as f."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> (s, t), both with the shape of f(x)."""
        shift = self.f(x)
        return shift.exp(), shift


class AffineAdapterSigmoid(nn.Module):
    """t = h[0::2], s = sigmoid(h[1::2] + 2) with h = f(x): even and odd channels of `module`'s output."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> (s, t), each with half the channels of f(x). ValueError if their number is odd."""
        h = self.f(x)
        if h.shape[1] % 2:
            raise ValueError(
                f"AffineAdapterSigmoid got {h.shape[1]} channels from {type(self.f).__name__}: expected an even "
                f"number, twice the channels of its input"
            )
        return (h[:, 1::2] + 2).sigmoid(), h[:, 0::2]
