"""Gradients that autograd adds up before a node runs: hooks see only the parts, and the sum when the node runs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..saved import is_ordinary
from ..torch_internals import node_number
from .step import Event

Edge = tuple[int, int]  # number of a node, and of its input
Edges = list[Edge | None]


def edges_of(node: Any) -> Edges:
    """Where the gradients that a node finds go; None for parameters, whose gradients existed before."""
    return [
        None if following is None or hasattr(following, "variable") else (node_number(following), position)
        for following, position in node.next_functions
    ]


def nodes_of(outputs: Iterable[Tensor], start: int) -> Iterator[Any]:
    """The nodes of a graph from its outputs on, without leaves and without those made before number `start`."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is None or following in seen or hasattr(following, "variable"):
                continue
            if node_number(following) >= start:
                seen.add(following)
                pending.append(following)


class Sums:
    """Adds the events and memories of the sums to a trace."""

    def __init__(self, events: list[Any], memories: list[int]):
        self.events, self.memories = events, memories
        self.parts: dict[Edge, int] = {}
        self.due: dict[Edge, int] = {}  # bytes of sums made since the last node: PyTorch adds after a node's hooks
        self.held: dict[Edge, int] = {}  # memories of sums that wait for their node

    def add(self, edges: Edges, found: Sequence[Tensor | None]) -> None:
        """A node has found these gradients."""
        for edge, gradient in zip(edges, found, strict=False):
            if edge is not None and gradient is not None and is_ordinary(gradient):
                self.parts[edge] = self.parts.get(edge, 0) + 1
                if self.parts[edge] == 2:
                    self.due[edge] = gradient.numel() * gradient.itemsize

    def run(self, number: int) -> None:
        """A node is about to run: from now on, its gradients are seen."""
        for edge, size in self.due.items():
            if edge[0] != number:
                self.held[edge] = len(self.memories)
                self.memories.append(size)
                self.events.append((Event.HOLD, self.held[edge]))
        self.due.clear()
        for edge in [edge for edge in self.held if edge[0] == number]:
            self.events.append((Event.LET, self.held.pop(edge)))

    def end(self) -> None:
        """The backward pass has ended."""
        self.events += [(Event.LET, memory) for memory in self.held.values()]
        for edges in (self.parts, self.due, self.held):
            edges.clear()
