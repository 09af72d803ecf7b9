"""The memory of a traced step, if other values were kept."""

from collections.abc import Sequence
from typing import NamedTuple

from .trace import Event, Step


class Outcome(NamedTuple):
    """What a choice costs."""

    peak: int  # bytes
    seconds: float  # to compute values again
    levels: list[int]  # bytes during each event, at its highest
    readers: list[int]  # of each value
    born: list[int]  # event from which on a value was needed
    first: list[int]  # event of the backward pass that first read a value, for itself or to compute another
    last: list[int]  # and last


def simulate(step: Step, kept: Sequence[bool]) -> Outcome:
    """The memory and time of a step that keeps these values, as `Value.get` computes the others.

    `kept`: one entry per node; those that are not free must be as `as_they_are` says.
    """
    nodes, memories, saved = step.nodes, step.memories, step.saved
    holders = [0] * len(memories)  # of each memory: the program's tensors and kept values
    signs_of = [0] * len(nodes)  # readers that need the signs only
    readers = _readers(step, kept)
    sign_bytes = [0] * len(nodes)
    for number, signs, _ in saved:
        if signs:
            signs_of[number] += 1
            sign_bytes[number] = signs
    references = [0] * len(nodes)
    reads = [0] * len(nodes)
    users = [0] * len(nodes)  # of a computed value's memory
    root: list[int] = [-1] * len(nodes)  # the node in whose memory a computed value is, -1 if it is not computed
    used_by_node: dict[int, int] = {}  # roots that a running backward node reads, by number of the saved
    level = peak = 0
    seconds = 0.0
    levels: list[int] = []
    born = [-1] * len(nodes)
    first = [len(step.events)] * len(nodes)
    last = [-1] * len(nodes)

    def only_signs(number: int) -> int:
        """Bytes that are kept instead of the memory, or 0."""
        if signs_of[number] and signs_of[number] == readers[number]:
            return sign_bytes[number]
        return 0

    def acquire(number: int) -> int:
        """A new reader of a value: what this adds to the level."""
        added = 0
        pending = [number]
        while pending:
            number = pending.pop()
            references[number] += 1
            if references[number] > 1:
                continue
            born[number] = position
            if not kept[number]:
                pending += nodes[number].inputs
            elif signs := only_signs(number):
                added += signs
            else:
                memory = nodes[number].memory
                holders[memory] += 1
                if holders[memory] == 1:
                    added += memories[memory]
        return added

    def release(number: int) -> int:
        """What goes with a reader."""
        freed = 0
        pending = [number]
        while pending:
            number = pending.pop()
            references[number] -= 1
            if references[number]:
                continue
            if not kept[number]:
                if root[number] >= 0:
                    freed += drop(number)
                pending += nodes[number].inputs
            elif signs := only_signs(number):
                freed += signs
            else:
                memory = nodes[number].memory
                holders[memory] -= 1
                if not holders[memory]:
                    freed += memories[memory]
        return freed

    def spare(number: int) -> bool:
        """Whether a value is computed for one reader, in memory of its own."""
        return nodes[number].is_fresh and not kept[number] and readers[number] == 1 and root[number] == number

    def unuse(number: int) -> int:
        users[number] -= 1
        return 0 if users[number] else nodes[number].bytes

    def drop(number: int) -> int:
        """Forget a computed value."""
        own = root[number]
        root[number] = -1
        return unuse(own) if own >= 0 else 0

    position = 0
    for position, (event, what) in enumerate(step.events):
        highest = level
        if event == Event.READ:
            number = saved[what].node
            first[number], last[number] = min(first[number], position), position
        if event == Event.HOLD:
            holders[what] += 1
            if holders[what] == 1:
                level += memories[what]
        elif event == Event.LET:
            holders[what] -= 1
            if not holders[what]:
                level -= memories[what]
        elif event == Event.SAVE:
            if saved[what].node >= 0:
                level += acquire(saved[what].node)
        elif event == Event.RELEASE:
            if (own := used_by_node.pop(what, -1)) >= 0:
                level -= unuse(own)
            if saved[what].node >= 0:
                level -= release(saved[what].node)
        elif event == Event.BUSY:
            highest += what
        elif not kept[saved[what].node]:
            # as `Value.get`: inputs first, each dropped after its last reader
            stack = [(saved[what].node, False)]
            while stack:
                number, ready = stack.pop()
                node = nodes[number]
                if not ready:
                    if root[number] >= 0 or kept[number]:
                        continue
                    stack.append((number, True))
                    for i in reversed(node.inputs):
                        if not kept[i]:
                            stack.append((i, False))
                    continue
                if root[number] >= 0:
                    continue
                seconds += node.seconds
                shared = node.inputs[0] if node.overwrites and spare(node.inputs[0]) else node.alias
                if shared >= 0 and not kept[shared]:
                    root[number] = root[shared]
                    if root[number] >= 0:
                        users[root[number]] += 1
                elif shared >= 0:
                    root[number] = -2  # in kept memory
                else:
                    root[number] = number
                    users[number] += 1
                    level += node.bytes
                    highest = max(highest, level + node.busy)
                for i in node.inputs:
                    first[i], last[i] = min(first[i], position), position
                    if not kept[i]:
                        reads[i] += 1
                        if reads[i] >= readers[i]:
                            level -= drop(i)
            number = saved[what].node
            reads[number] += 1
            if (own := root[number]) >= 0:
                used_by_node[what] = own
                users[own] += 1
            if reads[number] >= readers[number]:
                level -= drop(number)
        highest = max(highest, level)
        peak = max(peak, highest)
        levels.append(highest)
    return Outcome(peak, seconds, levels, readers, born, first, last)


def _readers(step: Step, kept: Sequence[bool]) -> list[int]:
    """How many operations and recipes read each value."""
    readers = [0] * len(step.nodes)
    pending = [saved.node for saved in step.saved if saved.node >= 0]
    while pending:
        number = pending.pop()
        readers[number] += 1
        if readers[number] == 1 and not kept[number]:
            pending += step.nodes[number].inputs
    return readers


def plain_peak(step: Step) -> int:
    """Bytes that the step takes at its peak if PyTorch keeps what it keeps without us."""
    holders = [0] * len(step.memories)
    level = peak = 0
    for event, what in step.events:
        if event == Event.BUSY:
            peak = max(peak, level + what)
        elif event != Event.READ:
            memory = what if event in (Event.HOLD, Event.LET) else step.saved[what].memory
            change = 1 if event in (Event.HOLD, Event.SAVE) else -1
            holders[memory] += change
            if holders[memory] == max(change, 0):
                level += change * step.memories[memory]
        peak = max(peak, level)
    return peak
