"""Micro-batches as a CUDA graph: the host launches one graph instead of thousands of kernels (`trainer.capture`)."""

import itertools
import pickle
import random
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.process.allocations import is_out_of_memory
from engine.process.console import logger
from engine.process.distributed import World
from engine.schema.training import CAPTURE_ADVICE
from keepless import before_capture
from models.private_torch import capturing, without_collection

MicroBatch = Callable[[Tensor, Tensor], Tensor]  # images, labels -> the loss, after its backward pass
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
_DRAWS = re.compile("dropout|droppath|dropblock|stochasticdepth|rrelu", re.IGNORECASE)
_PLAIN = (NoneType, bool, int, float, complex, str, np.generic, itertools.count)
_PYTORCHS = vars(nn.Module()).keys() - {"training"}  # attributes
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_ALIGNED = 128  # values: gradients begin where an allocator would put them, so kernels read them in the same order


class FlatGradients:
    """The gradients of a network, moved into one buffer per dtype that stays where it is: a graph adds to them.

    Parameters that no backward pass has reached have no gradient, so optimisers leave them alone.
    """

    @torch.no_grad()
    def __init__(self, network: nn.Module):
        self.network = network
        self.parts: dict[nn.Parameter, Tensor] = {}  # of the buffers, by the parameter whose gradient they are
        self.buffers: list[Tensor] = []
        gradients_by_dtype: dict[torch.dtype, dict[nn.Parameter, Tensor]] = {}
        for parameter in network.parameters():
            if parameter.grad is not None:
                gradients_by_dtype.setdefault(parameter.grad.dtype, {})[parameter] = parameter.grad
        for dtype, gradients in gradients_by_dtype.items():
            lengths = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in gradients]
            device = next(iter(gradients)).device
            buffer = torch.zeros(sum(lengths), dtype=dtype, device=device)
            for (parameter, gradient), part in zip(gradients.items(), buffer.split(lengths), strict=True):
                like = torch.empty_like(parameter, device="meta")  # dense, in the parameter's memory format
                self.parts[parameter] = part.as_strided(like.shape, like.stride()).copy_(gradient)
                parameter.grad = self.parts[parameter]
            self.buffers.append(buffer)

    def names_outside(self) -> list[str]:
        """Names of parameters whose gradient lies outside the buffers."""
        named = self.network.named_parameters()
        return [name for name, parameter in named if parameter.grad is not self.parts.get(parameter)]


class NotCaptured(ValueError):
    """A micro-batch cannot be captured. Nothing of it has run, so it can be taken eagerly."""


class CapturedMicroBatches:
    """Runs micro-batches: eagerly at first, and from `begin` on as a CUDA graph with static crops and labels.

    The first passes, which are steps of the run, warm up what a graph must not do: compiling, choosing algorithms,
    measuring. Capturing runs nothing on the device, so it changes no statistics and draws no numbers there.

    Args:
        network: its parameters get gradients, from `begin` on in `gradients`.
        repeats: what makes the backward pass run blocks again, which must then not draw random numbers; empty: nothing.
        requested: trainer.capture=true, so there are no eager steps instead.
        record: runs a function once; returns a function that runs it again on the same memory, and its result.
    """

    def __init__(self, network: nn.Module, repeats: str = "", requested: bool = True, record: Recorder | None = None):
        self.network = network
        self.repeats = repeats
        self.requested = requested
        self.gradients: FlatGradients | None = None
        self.stream = torch.cuda.Stream() if record is None else None
        # Not a method: in a cycle, the graph would outlive us.
        self.record = record or partial(_cuda_graph, self.stream)
        self.replay: Callable[[], None] | None = None
        self.problem: str | None = None  # found in a warm-up step
        self.numbers: dict[str, Any] | None = None  # `numbers_of` the network after the last micro-batch
        self.has_warned = False
        self.images: Tensor
        self.labels: Tensor
        self.loss: Tensor

    def begin(self) -> None:
        """Capture the next micro-batch, and replay it from then on. It adds to the gradients of the last step."""
        self.gradients = self.gradients or FlatGradients(self.network)

    def release(self) -> None:
        """Free the graph's memory, which nothing else can use; the next micro-batch is captured again."""
        self.replay = None
        self.images = self.labels = self.loss = torch.empty(0)

    def zero_gradients(self) -> None:
        """Zero the gradients before a step; before an eager one free them: they take no memory in its forward pass."""
        if self.gradients is None:
            self.network.zero_grad()
            return
        for buffer in self.gradients.buffers:
            buffer.zero_()

    def average_gradients(self, world: World) -> None:
        """Average the gradients over the ranks, after the last micro-batch. Every rank must call it."""
        if world.size == 1:
            return
        gradients = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        for tensor in gradients if self.gradients is None else self.gradients.buffers:
            world.sum_(tensor.div_(world.size))  # in DDP's order

    def __call__(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a micro-batch, whose gradients were added to `gradients`; the next call overwrites it.

        NotCaptured: the micro-batch cannot be captured. ValueError: it has another size than the captured one.
        """
        if self.gradients is None:
            with before_capture():
                loss = self._run_eagerly(micro_batch, images, labels)
            self.problem = self.problem or self._compare_numbers(micro_batch)
            return loss
        if self.replay is None:
            self._capture(micro_batch, images, labels, self.gradients)
        if images.shape != self.images.shape:
            sizes = f"{tuple(images.shape)} and {tuple(self.images.shape)}"
            raise ValueError(f"images of shapes {sizes} cannot share a CUDA graph: {CAPTURE_ADVICE}")
        self.images.copy_(images, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        assert self.replay is not None, "it was captured"
        self.replay()
        return self.loss

    def _run_eagerly(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """Run a micro-batch on the stream of the capture, where libraries keep their workspaces; return its loss.

        If it draws random numbers in blocks that the backward pass repeats, this is noted as the `problem`.
        """
        if self.stream is None:
            return micro_batch(images, labels)
        before = torch.cuda.get_rng_state()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = micro_batch(images, labels)
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.repeats and not torch.equal(before, torch.cuda.get_rng_state()):
            self.problem = (
                f"{self.repeats} runs blocks a second time, and the network draws random numbers"
                f"{listed_few(random_modules(self.network))}, which would be others in a CUDA graph"
            )
        return loss

    def _capture(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor, gradients: FlatGradients) -> None:
        """Capture a step's first micro-batch. If that fails, gradients are left, and no random number was drawn.

        Modules that count their calls in Python have then counted one more.
        """
        self.numbers = numbers_of(self.network, micro_batch)
        if self.problem is not None:
            raise NotCaptured(self.problem)
        try:
            self.images = images.clone()
            self.labels = labels.clone()
            with _without_random_numbers(self.network):
                self.replay, self.loss = self._record_graph(micro_batch)
        except Exception as error:
            if not self.requested and is_out_of_memory(error):
                raise NotCaptured(f"a CUDA graph needs more memory than there is ({_first_line(error)})") from None
            raise
        names = gradients.names_outside()
        if names:
            raise NotCaptured(f"{names[0]} has a gradient in some steps only, and a CUDA graph in all")
        problem = self._compare_numbers(micro_batch)
        if problem is not None:
            raise NotCaptured(problem)

    def _record_graph(self, micro_batch: MicroBatch) -> tuple[Callable[[], None], Tensor]:
        """Record the micro-batch as a graph; return what replays it, and its loss.

        NotCaptured names the module that raised an error.
        """
        raised: list[Exception] = []

        def run_and_note_error() -> Tensor:
            try:
                return micro_batch(self.images, self.labels)
            except Exception as error:
                raised.append(error)
                raise

        try:
            with without_collection():  # what it frees may call CUDA, which would end the capture
                return self.record(run_and_note_error)
        except Exception as last:  # PyTorch may raise another one when the capture ends
            error = raised.pop() if raised else last
            try:
                if is_out_of_memory(error):
                    raise error from None
                raise NotCaptured(self._problem_behind(error)) from last
            finally:
                del error  # or a cycle would keep the tensors of the pass

    def _problem_behind(self, error: Exception) -> str:
        """Which module cannot be captured, by the error that it raised."""
        place = "in a CUDA graph"
        if "stream is capturing" in str(error):  # CUDA's words where the host would wait for the device
            place += ", where nothing may read a tensor's value"
        return f"{self._module_of(error)} cannot be captured {place} ({_first_line(error)})"

    def _compare_numbers(self, micro_batch: MicroBatch) -> str | None:
        """Note the modules' numbers. Returns the problem if a number has changed since the last micro-batch.

        Where `requested`, the first change is only a warning.
        """
        previous_numbers = self.numbers
        self.numbers = numbers_of(self.network, micro_batch)
        if previous_numbers is None or self.has_warned:  # the first micro-batch may initialise modules
            return None
        names = previous_numbers | self.numbers
        name = next((name for name in names if previous_numbers.get(name) != self.numbers.get(name)), None)
        if name is None:
            return None
        text = f"{name} changes from step to step, and a CUDA graph would repeat its present value"
        if not self.requested:
            return text
        self.has_warned = True
        logger.warning(f"trainer.capture=true: {text}")
        return None

    def _module_of(self, error: BaseException) -> str:
        """The name and class of the innermost module that was running when the error was raised."""
        texts = {id(module): _module_text(name, module) for name, module in self.network.named_modules()}
        innermost = "the network or its loss"
        for frame, _ in traceback.walk_tb(error.__traceback__):
            innermost = texts.get(id(frame.f_locals.get("self")), innermost)
        return innermost


def _module_text(name: str, module: nn.Module) -> str:
    return f"{name or 'the network'} ({type(module).__name__})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def random_modules(network: nn.Module) -> list[str]:
    """Names of the modules that draw random numbers in training, as far as the names of their classes say it."""
    names = []
    for name, module in network.named_modules():
        attributes = vars(module)
        drop_probability = attributes.get("p", attributes.get("drop_prob", 1))  # PyTorch's and timm's names
        if _DRAWS.search(type(module).__name__) and drop_probability:
            names.append(name)
    return names


def listed_few(names: list[str]) -> str:
    """The first two names in brackets, and how many more there are; empty without names."""
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f" ({', '.join(names[:2])}{rest})" if names else ""


def _cuda_graph(stream: torch.cuda.Stream | None, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a function as a CUDA graph; return what replays it, and the function's result."""
    with capturing(stream) as graph:
        result = function()
    return graph.replay, result


@contextmanager
def _without_random_numbers(network: nn.Module) -> Iterator[None]:
    """Context in which the CPU draws no random number. NotCaptured: it does. After any error it has drawn none."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
        before = (torch_state.numpy(), python_state, numpy_state)
        after = (torch.get_rng_state().numpy(), random.getstate(), np.random.get_state())
        if pickle.dumps(before) != pickle.dumps(after):
            raise NotCaptured(
                f"the network draws random numbers on the CPU{listed_few(random_modules(network))}, and a CUDA graph "
                f"would repeat them"
            )
    except Exception:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        raise


def numbers_of(network: nn.Module, micro_batch: MicroBatch) -> dict[str, Any]:
    """Numbers, texts and generators in attributes of modules and their classes, by name, to be compared.

    It covers the modules of the network, and those in the micro-batch's closure, such as the loss.
    """
    modules = dict(network.named_modules())
    if isinstance(micro_batch, FunctionType):
        for name, cell in zip(micro_batch.__code__.co_freevars, micro_batch.__closure__ or (), strict=True):
            if isinstance(cell.cell_contents, nn.Module):
                modules |= dict(cell.cell_contents.named_modules(prefix=name))
    owners: dict[str, Any] = {_module_text(name, module): module for name, module in modules.items()}
    for kind in {kind for module in modules.values() for kind in type(module).__mro__}:
        if kind.__module__.partition(".")[0] != "torch":
            owners[f"class {kind.__name__}"] = kind
    seen = {*map(id, modules.values())}
    return {
        f"{name} of {text}": state
        for text, owner in owners.items()
        for name, state in _states(owner, 3, seen)
        if state is not None
    }


def _states(owner: Any, depth: int, seen: set[int]) -> list[tuple[str, Any]]:
    """The `_state` of each attribute that is not PyTorch's, by name."""
    attributes = getattr(owner, "__dict__", {})
    return [(name, _state(value, depth, seen)) for name, value in attributes.items() if name not in _PYTORCHS]


def _state(value: Any, depth: int, seen: set[int]) -> Any:
    """A value's numbers, texts and generators, nested like it; None if it has none.

    `depth`: how many levels of objects are looked into. `seen`: ids of the containers and objects so far; one that was
    met at the last level is not looked into when it is met again nearer.
    """
    if isinstance(value, Tensor):
        is_constant = type(value) is Tensor and value.is_cpu and value.dim() == 0  # kernels take its number
        return repr(value.item()) if is_constant else None
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _GENERATORS + (np.ndarray,)) and not isinstance(value, random.SystemRandom):
        return pickle.dumps(value)
    if depth == 0 or id(value) in seen or isinstance(value, type):
        return None
    seen.add(id(value))
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [_state(element, depth - 1, seen) for element in value]
    if isinstance(value, dict):
        return [(repr(key), _state(element, depth - 1, seen)) for key, element in value.items()]
    return _states(value, depth - 1, seen) or None
