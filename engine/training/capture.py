"""Micro-batches as a CUDA graph: the host launches one graph instead of thousands of kernels (`trainer.capture`)."""

import random
import re
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor, nn

from engine.process.allocations import is_out_of_memory
from engine.process.distributed import World
from keepless.torch_internals import capturing

MicroBatch = Callable[[Tensor, Tensor], Tensor]  # images, labels -> the loss, after its backward pass
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
_DRAWS = re.compile("dropout|droppath|dropblock|stochasticdepth|rrelu", re.IGNORECASE)
_ALIGNED = 128  # values: gradients begin where an allocator would put them, so kernels read them in the same order


class FlatGradients:
    """The gradients of a network, in one buffer per dtype that stays where it is: a graph adds to them.

    Parameters that no backward pass reaches have no gradient, so optimisers leave them alone.
    """

    def __init__(self, network: nn.Module):
        self.network = network
        self.owners: dict[nn.Parameter, Tensor] = {}  # each with its part of a buffer
        self.buffers: list[Tensor] = []

    def zero_(self) -> None:
        """Set all gradients to zero, in place."""
        for buffer in self.buffers:
            buffer.zero_()

    def strangers(self) -> list[str]:
        """Names of parameters whose gradient lies elsewhere."""
        return [
            name
            for name, parameter in self.network.named_parameters()
            if parameter.grad is not self.owners.get(parameter)
        ]

    @torch.no_grad()
    def adopt(self) -> None:
        """Move gradients that backward passes have made into buffers."""
        if not self.strangers():
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
        self.owners, self.buffers = {}, []
        for parameters in by_dtype.values():
            lengths = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
            assert parameters[0].grad is not None, "those without a gradient are left out"
            buffer = parameters[0].grad.new_zeros(sum(lengths))
            for parameter, part in zip(parameters, buffer.split(lengths), strict=True):
                like = torch.empty_like(parameter, device="meta")  # dense, in the parameter's memory format
                own = part.as_strided(like.shape, like.stride())
                assert parameter.grad is not None, "those without a gradient are left out"
                parameter.grad = self.owners[parameter] = own.copy_(parameter.grad)
            self.buffers.append(buffer)


class NotCaptured(ValueError):
    """A micro-batch cannot be captured. Nothing of it has run, so it can be taken eagerly."""


class CapturedMicroBatches:
    """Runs micro-batches: eagerly at first, and from `begin` on as a CUDA graph with static crops and labels.

    The first passes, which are steps of the run, warm up what a graph must not do: compiling, choosing algorithms,
    measuring. Capturing runs nothing on the device, so it changes no statistics and draws no numbers there.

    Args:
        network: its parameters get `gradients`.
        advice: the end of every error: how to train without.
        repeats: what makes the backward pass run blocks again, which must then not draw random numbers; empty: nothing.
        requested: what cannot be captured is an error; else `NotCaptured` is raised, and a step can go on eagerly.
        record: runs a function once; returns a function that runs it again on the same memory, and its result.
    """

    def __init__(
        self,
        network: nn.Module,
        advice: str,
        repeats: str = "",
        requested: bool = True,
        record: Recorder | None = None,
    ):
        self.network, self.advice, self.repeats, self.requested = network, advice, repeats, requested
        self.gradients = FlatGradients(network)
        self.reached: list[nn.Parameter] = []  # by the backward pass of the last step
        self.stream = torch.cuda.Stream() if record is None else None
        self.record = record or self._graph
        self.is_warm = False
        self.replay: Callable[[], None] | None = None
        self.problem: str | None = None  # found in a warm-up step
        self.images: Tensor
        self.labels: Tensor
        self.loss: Tensor

    def begin(self) -> None:
        """Capture the next micro-batch, and replay it from then on."""
        self.is_warm = True

    def release(self) -> None:
        """Free the graph's memory, which nothing else can use; the next micro-batch is captured again."""
        self.replay = None
        self.images = self.labels = self.loss = torch.empty(0)

    def zero_gradients(self) -> None:
        """Before a step: gradients have their places once a micro-batch was captured or ranks have averaged them.

        Until then there are none, as before eager steps: they take no memory in the forward pass.
        """
        if self.gradients.buffers:
            self.gradients.zero_()
        else:
            self.reached = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
            for parameter in self.reached:
                parameter.grad = None

    def average_gradients(self, world: World) -> None:
        """Average the gradients over the ranks, after the last micro-batch. Every rank must call it."""
        if world.size > 1 and self.replay is None:
            self.gradients.adopt()
        for buffer in self.gradients.buffers if world.size > 1 else ():
            world.sum_(buffer.div_(world.size))  # in DDP's order

    def __call__(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a micro-batch, whose gradients were added to `gradients`; the next call overwrites it.

        ValueError: the micro-batch cannot be captured (`NotCaptured` unless `requested`); or it has another size.
        """
        if not self.is_warm:
            return self._eagerly(micro_batch, images, labels)
        if self.replay is None:
            self._capture(micro_batch, images, labels)
        if images.shape != self.images.shape:
            sizes = f"{tuple(images.shape)} and {tuple(self.images.shape)}"
            raise ValueError(f"images of shapes {sizes} cannot share a CUDA graph: {self.advice}")
        self.images.copy_(images, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        assert self.replay is not None, "it was captured"
        self.replay()
        return self.loss

    def _eagerly(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """On the stream of the capture, where libraries keep their workspaces."""
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
                f"{listed_few(drawing(self.network))}, which would be others in a CUDA graph"
            )
            if self.requested:
                raise ValueError(f"{self.problem}: {self.advice}")
        return loss

    def _capture(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> None:
        """Capture a step's first micro-batch. If that fails, gradients are left, and no random number was drawn.

        Modules that count their calls in Python have then counted one more.
        """
        drawn = torch.get_rng_state(), random.getstate()
        try:
            if self.problem is not None:
                raise NotCaptured(self.problem)
            for parameter in () if self.gradients.buffers else self.reached:
                parameter.grad = torch.zeros_like(parameter)
            self.gradients.adopt()
            self.images, self.labels = images.clone(), labels.clone()
            self.replay, self.loss = self._recorded(micro_batch)
            if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
                raise NotCaptured(
                    f"the network draws random numbers on the CPU{listed_few(drawing(self.network))}, and a CUDA graph "
                    f"would repeat them"
                )
            if strangers := self.gradients.strangers():
                raise NotCaptured(f"{strangers[0]} has a gradient in some steps only, and a CUDA graph in all")
        except Exception as error:
            torch.set_rng_state(drawn[0])
            random.setstate(drawn[1])
            if not self.requested and is_out_of_memory(error):
                raise NotCaptured(f"a CUDA graph needs more memory than there is ({_first_line(error)})") from None
            if self.requested and isinstance(error, NotCaptured):
                raise ValueError(f"{error}: {self.advice}") from error
            raise

    def _recorded(self, micro_batch: MicroBatch) -> tuple[Callable[[], None], Tensor]:
        """The micro-batch as a graph, and its loss. NotCaptured names the module that raised an error."""
        raised: list[Exception] = []

        def watched() -> Tensor:
            try:
                return micro_batch(self.images, self.labels)
            except Exception as error:
                raised.append(error)
                raise

        try:
            return self.record(watched)
        except Exception as last:  # PyTorch may raise another one when the capture ends
            error = raised[0] if raised else last
            if is_out_of_memory(error) or self.requested and not isinstance(error, RuntimeError):
                raise error from None
            raise NotCaptured(
                f"{self._module_of(error)} cannot be captured in a CUDA graph, where nothing may read a tensor's value "
                f"({_first_line(error)})"
            ) from last
        finally:
            raised.clear()  # or a cycle would keep the tensors of the pass

    def _graph(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """The function as a CUDA graph."""
        with capturing(self.stream) as graph:
            result = function()
        return graph.replay, result

    def _module_of(self, error: BaseException) -> str:
        """The name and class of the innermost module that was running when the error was raised."""
        names = {id(module): name for name, module in self.network.named_modules()}
        found, line = "the network or its loss", error.__traceback__
        while isinstance(line, TracebackType):
            module = line.tb_frame.f_locals.get("self")
            if id(module) in names:
                found = f"{names[id(module)] or 'the network'} ({type(module).__name__})"
            line = line.tb_next
        return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def drawing(network: nn.Module) -> list[str]:
    """Names of the modules that draw random numbers in training, as far as the names of their classes say it."""
    return [
        name
        for name, module in network.named_modules()
        if _DRAWS.search(type(module).__name__) and vars(module).get("p", vars(module).get("drop_prob", 1))
    ]


def listed_few(names: list[str]) -> str:
    """The first two names in brackets, and how many more there are; empty without names."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f" ({', '.join(names[:2])}{more})" if names else ""
