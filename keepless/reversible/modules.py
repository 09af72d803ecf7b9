"""Modules that restore their inputs from their outputs instead of saving them (RevNet, MemCNN)."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import check_module
from ..norms.statistics import statistics_kept
from ..torch_internals import KeeplessWarning, call_at_compilation, warn
from .chain import Pass, as_tuple
from .couplings import has_hooks, is_low_under_autocast, runs_in_halves, widened


class InvertibleModuleWrapper(nn.Module):
    """Run an invertible module without saving its activations: the backward pass recomputes them from its output.

    If the input of a wrapper is the output of another, that output is no longer kept. An input with other references
    stays as it is. Gradients, hooks and running statistics are the same as without the wrapper. Without gradients, and
    inside `torch.compile`, the wrapper does nothing.

    In the backward pass, a coupling's branches run once more, and other modules twice: inverse and forward. The
    restored input differs by rounding.

    Args:
        fn: a module with `forward` and `inverse`, from one or several tensors to one or several tensors. It must
            compute the same when it runs again (dropout does: see `preserve_rng_state`), and not overwrite its input.
        keep_input: keep the input of `forward` instead; `fn` needs no inverse then.
        keep_input_inverse: the same for `inverse`.
        num_bwd_passes: for compatibility with MemCNN; any number of backward passes works, with `retain_graph=True` for
            all but the last.
        disable: only call `fn`.
        preserve_rng_state: draw the same random numbers in the second run. False saves little time, and gives wrong
            gradients if `fn` draws random numbers.

    Raises:
        ValueError: `fn` has no inverse, or num_bwd_passes is below 1.
    """

    def __init__(
        self,
        fn: nn.Module,
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        num_bwd_passes: int = 1,
        disable: bool = False,
        preserve_rng_state: bool = True,
    ):
        super().__init__()
        if num_bwd_passes < 1:
            raise ValueError(f"num_bwd_passes={num_bwd_passes}: expected at least 1")
        check_module(fn, type(self).__name__)
        if not keep_input and inverse_of(fn) is None:
            raise ValueError(
                f"{type(fn).__name__} has no method inverse: expected an invertible module, such as a coupling; "
                f"keep_input=True works with any module"
            )
        self._fn: Any = fn
        self.keep_input = keep_input
        self.keep_input_inverse = keep_input_inverse
        self.num_bwd_passes = num_bwd_passes
        self.disable = disable
        self.preserve_rng_state = preserve_rng_state

    @property
    def invertible(self) -> bool:
        """Whether `fn` has an inverse."""
        return inverse_of(self._fn) is not None

    def forward(self, *xin: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return fn(*xin). ValueError if an input or output is not a tensor; `fn` may raise more."""
        return self._run(xin, inverts=False)

    def inverse(self, *yin: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return fn.inverse(*yin), without keeping yin."""
        return self._run(yin, inverts=True)

    def _run(self, values: tuple[Tensor, ...], inverts: bool) -> Tensor | tuple[Tensor, ...]:
        """Run `fn` or its inverse, and keep the inputs or restore them."""
        function = self._fn.inverse if inverts else self._fn
        if self.disable or not torch.is_grad_enabled():
            return function(*values)
        values = as_tuple(values)
        if torch.compiler.is_compiling():
            call_at_compilation(_warn_of_kept_activations)
            return function(*values)
        run = Pass(values, preserve_rng_state=self.preserve_rng_state)
        keeps_input = self.keep_input_inverse if inverts else self.keep_input
        if keeps_input:
            run.apply([self._fn], function)
        elif runs_in_halves(self._fn):
            if is_low_under_autocast(values[0]) and not run.boundary.outputs:  # no wrapper comes before it
                warn(
                    f"InvertibleModuleWrapper got a {values[0].dtype} input under autocast, so the sums of many such "
                    f"modules add up rounding: give the first one x.float(), or use a ReversibleSequence, which does"
                )
            run.couple(self._fn, inverse=inverts)
        else:
            run.apply([self._fn], function, self._fn if inverts else inverse_of(self._fn))
        outputs = run.finish()
        return outputs if len(outputs) > 1 else outputs[0]


class ReversibleSequence(nn.Module):
    """Invertible modules in sequence; only the output of the last one is kept (RevNet, Algorithm 1).

    Couplings with the same `split_dim` pass on their halves, so nothing is concatenated between them. A coupling that
    is not invertible (`Coupling.invertible`), and any module without a method `inverse`, keeps its input.

    Every module takes the one tensor that the module before it returned. Under autocast couplings get and return at
    least float32 (their branches compute in low precision), or rounding would add up. `disable`: keep all activations.
    """

    def __init__(self, blocks: Iterable[nn.Module], disable: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.disable = disable

    @property
    def invertible(self) -> bool:
        """Whether every block has an inverse."""
        return all(inverse_of(block) is not None for block in self.blocks)

    @property
    def reversible_blocks(self) -> list[nn.Module]:
        """All blocks, with nested sequences flattened."""
        return [part for block in self.blocks for part in _flat_blocks(block)]

    def forward(self, x: Tensor) -> Tensor:
        """Run x through all blocks; raises what they raise."""
        return run_reversibly(self.reversible_blocks, x, self.disable)

    def inverse(self, y: Tensor) -> Tensor:
        """y -> x. ValueError if a block has no inverse."""
        for block in reversed(self.blocks):
            inverse = inverse_of(block)
            if inverse is None:
                raise ValueError(f"{type(block).__name__} of a ReversibleSequence has no inverse")
            y = inverse(y)
        return y


def run_reversibly(blocks: Iterable[nn.Module], x: Tensor, disable: bool = False) -> Tensor:
    """Run modules like a `ReversibleSequence`."""
    reversible = torch.is_grad_enabled() and not disable
    if reversible and torch.compiler.is_compiling():
        call_at_compilation(_warn_of_kept_activations)
        for block in blocks:
            x = block(widened(x) if runs_in_halves(block) else x)
        return x
    forward = Pass((x,), reversible=reversible, widens=True)
    for block in blocks:
        if runs_in_halves(block):
            forward.couple(block)
        else:
            forward.apply([block], block, inverse_of(block))
    (y,) = forward.finish()
    return y


def _warn_of_kept_activations(_: object) -> None:
    warnings.warn(
        "reversible modules keep their activations inside torch.compile, where the compiler decides what to keep: "
        "compile their branches instead, or wrap blocks in torch.utils.checkpoint, which it follows",
        KeeplessWarning,
        stacklevel=1,
    )


@torch.no_grad()
def is_invertible_module(
    module_in: nn.Module,
    test_input_shape: Sequence[int] | Sequence[Sequence[int]],
    test_input_dtype: torch.dtype = torch.float32,
    atol: float = 1e-6,
    random_seed: int = 42,
) -> bool:
    """Whether inverse(forward(x)) and forward(inverse(x)) are x, tried on random numbers in the module's current mode.

    Does not change the global random state, the running statistics or the module's parameters.

    Args:
        module_in: any module; False if it has no methods `forward` and `inverse`.
        test_input_shape: the shape of its input, or a sequence of the shapes of its inputs.
        test_input_dtype: the dtype of its inputs.
        atol: largest difference allowed.
        random_seed: for the inputs and the module's own random numbers, e.g. in dropout.
    """
    inverse = inverse_of(module_in)
    if inverse is None:
        return False
    has_several_inputs = bool(test_input_shape) and not isinstance(test_input_shape[0], int)
    shapes: Any = test_input_shape if has_several_inputs else [test_input_shape]
    device = next((tensor.device for tensor in module_in.parameters()), torch.device("cpu"))
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    generator = torch.Generator().manual_seed(random_seed)
    inputs = [torch.rand(*shape, generator=generator).to(device, test_input_dtype) for shape in shapes]

    def seed() -> None:
        """Seed the generators that are put back afterwards; `torch.manual_seed` seeds those of all devices."""
        torch.default_generator.manual_seed(random_seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(random_seed)

    def restores(function: Callable, inverse_function: Callable) -> bool:
        seed()
        outputs = as_tuple(function(*(tensor.clone() for tensor in inputs)))
        seed()
        restored = as_tuple(inverse_function(*(tensor.clone() for tensor in outputs)))
        if len(restored) != len(inputs):
            return False
        pairs = zip(inputs, restored, strict=True)
        return all(x.shape == y.shape and torch.allclose(x, y, atol=atol) for x, y in pairs)

    with torch.random.fork_rng(devices), statistics_kept(module_in):
        return restores(module_in, inverse) and restores(inverse, module_in)


def _flat_blocks(block: nn.Module) -> list[nn.Module]:
    """The blocks of a nested sequence, the coupling of a wrapper, or the block itself: one chain restores them all."""
    if has_hooks(block):
        return [block]
    if type(block) is ReversibleSequence and not block.disable:
        return block.reversible_blocks
    if type(block) is InvertibleModuleWrapper and block.preserve_rng_state and runs_in_halves(block._fn):
        return [block] if block.disable or block.keep_input else [block._fn]
    return [block]


def inverse_of(module: object) -> Callable | None:
    """A module's method `inverse`, if it has one that works."""
    inverse = getattr(module, "inverse", None)
    return inverse if callable(inverse) and getattr(module, "invertible", True) else None
