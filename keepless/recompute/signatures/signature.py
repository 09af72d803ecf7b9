"""A signature of a network's inputs: what passes with such inputs have taught, and the plan that they follow."""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

from ..passes.advice import Advice
from ..passes.plan import MORE, Plan
from ..passes.report import KeptTensor
from ..step.watch import Watch
from .gradients import Backward
from .plans import Plans

_TRIES = 4  # steps that are watched to meet one as large as one that was larger than planned

Size = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


class Origin(Enum):
    """Which size the plan of a signature was made for."""

    NONE = auto()  # there is no plan: none has been made yet, or, if no step is due to be watched, none can be
    OWN = auto()  # this one
    NEAR = auto()  # a little larger one
    FAR = auto()  # another one, so there may be a much faster plan


class Lesson(Enum):
    """What is known about the calls of a signature's passes."""

    NEW = auto()  # nothing: the next pass teaches advice
    LENT = auto()  # another size has lent advice: the next pass is recorded beside it
    LEARNED = auto()  # passes follow the advice
    NONE = auto()  # there can be no advice: the rules decide about each pass


class Signature:
    """Inputs whose passes share advice, and with a budget, where they have one size, the same plan.

    What the next pass does (`Signatures.recording`):

    | is_due | origin | lesson | without a budget | within a budget |
    |---|---|---|---|---|
    | yes | NONE | any | teaches advice | is watched, and the pass after its step gets a plan |
    | yes | other | any | | is watched; while it awaits its backward pass, others follow the plan without advice |
    | no | NONE | any | as its lesson says | holds elsewhere what it saves beyond the budget |
    | no | other | NEW | | follows the plan, and teaches advice |
    | no | other | LENT, NONE | | follows the plan, as the rules repeat its calls |
    | no | other | LEARNED | | follows the plan by the advice |

    Without a budget, some passes teach advice anew whatever happened: see `must_be_recorded`.
    """

    def __init__(self, kind: tuple[Any, ...], size: Size, base: "Signature | None" = None) -> None:
        self.kind = kind  # what does not depend on the size
        self.size = size
        self.input_bytes = sum(size[1])
        self.base = base or self  # the one of all passes with these inputs
        self.coming: Signature | None = None  # of passes before which no parameter has a gradient: see `Plans`
        self.is_due = True  # a step is to be watched, or without a budget a pass to teach advice
        self.watch: Watch | None = None  # the last step that was watched, until it is planned
        self.backward: Backward | None = None  # of the last pass, if no backward pass has followed the watched one
        self.plan: Plan | None = None
        self.origin = Origin.NONE
        self.advice: Advice | None = None
        self.lesson = Lesson.NEW
        self.kept: Sequence[KeptTensor] = ()  # by the last pass that was not like earlier ones
        self.pass_count = 0
        self.attempt_count = 0  # plans so far, or without a budget advice
        self.exceeded_bytes = 0  # bytes of the results of a plan that were too few for a pass, until there are more
        self.try_count = 0  # steps that were watched since
        self.stray_count = 0  # passes that have left the plan, before one that has followed it
        self.slack = 0  # bytes of results that a pass may make too early, as experts with more tokens than others do
        # Without a budget, of passes that were recorded by the rules, or should have been
        self.most_bytes = 0  # of inputs of a recorded pass
        self.most_nodes = 0  # of a pass that had a longer graph than recorded ones
        self.functions = frozenset[Any]()  # of calls that recorded passes lack
        self.is_unlike = False  # the last pass had more nodes, or a new function

    def must_be_recorded(self, pass_bytes: int) -> bool:
        """Whether the next pass, with inputs of so many bytes, is recorded by the rules: no unusual pass decides long.

        Passes k + 2**k are (3, 6, 11, 20, 37, …, so that what comes every second or fourth pass is not met alone); so
        are those with over twice the inputs of recorded ones, or after a pass with calls that these lack: of another
        function, or for a longer graph than any pass before.
        """
        number = self.pass_count + 1
        k = number.bit_length() - 1
        return self.is_unlike or number == k + 2**k or pass_bytes > 2 * self.most_bytes

    def record(self, pass_bytes: int) -> None:
        """Let the next pass, with inputs of so many bytes, be recorded by the rules."""
        self.most_bytes = max(self.most_bytes, pass_bytes)
        self.is_unlike = False
        self.forget_advice()

    def note_functions(self, functions: Iterable[Any]) -> None:
        """Note that a pass had calls of these functions that recorded ones lack."""
        new_functions = frozenset(functions) - self.functions
        self.functions |= new_functions
        self.is_unlike = self.is_unlike or bool(new_functions)

    def note_nodes(self, node_count: int) -> None:
        """Note that a pass had a longer graph than recorded ones."""
        self.is_unlike = node_count > self.most_nodes
        self.most_nodes = max(self.most_nodes, node_count)

    def forget_advice(self) -> None:
        self.advice = None
        self.lesson = Lesson.NEW

    def follow(self, plan: Plan | None, origin: Origin = Origin.OWN, advice: Advice | None = None) -> None:
        """Let the next pass follow a plan, and teach advice unless another size has lent some."""
        self.plan = plan
        self.origin = Origin.NONE if plan is None else origin
        self.advice = advice
        self.lesson = Lesson.NEW if advice is None else Lesson.LENT
        self.is_due = False
        self.attempt_count += 1
        self.stray_count = 0

    def follow_own(self, plans: Plans | None) -> None:
        """Let passes follow plans that were made for this size; None: there can be none."""
        plan, coming_plan = (None, None) if plans is None else plans
        self.follow(plan)
        self.set_coming(None if coming_plan is plan else coming_plan)
        is_smaller = plan is not None and plan.bytes < MORE * self.exceeded_bytes
        self.is_due = is_smaller and self.try_count < _TRIES
        self.try_count = self.try_count + 1 if self.is_due else 0
        if not self.is_due:
            self.exceeded_bytes = 0

    def borrow(self, lender: "Signature", origin: Origin) -> None:
        """Follow the plan and the advice of another size."""
        self.follow(lender.plan, origin, lender.advice)
        if lender.coming is not None:
            self.set_coming(lender.coming.plan, lender.coming.advice)

    def set_coming(self, plan: Plan | None, advice: Advice | None = None) -> None:
        """Give passes before which no parameter has a gradient a plan of their own; None: they have none."""
        self.coming = None
        if plan is not None:
            self.coming = Signature(self.kind, self.size, base=self)
            self.coming.follow(plan, self.origin, advice)
            self.coming.attempt_count = self.attempt_count

    def awaits_backward(self) -> bool:
        """Whether the pass that was watched, or one after it, still waits for its backward pass."""
        if self.watch is not None:
            return self.watch.is_awaited()
        return self.backward is not None and not self.backward.has_begun
