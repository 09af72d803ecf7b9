"""A signature of a network's inputs: what passes with such inputs have taught, and the plan that they follow."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..passes.advice import Advice
from ..passes.plan import MORE, Plan
from ..passes.report import KeptTensor
from ..step.watch import Watch
from .gradients import Backward
from .plans import Plans

_NEAR = 1.5  # the plan of a size with at most so many times an input's bytes is good enough for the input
_TRIES = 4  # steps that are watched to meet one as large as one that was larger than planned


class Signature:
    """Inputs whose passes share advice, and with a budget, where they have one size, the same plan.

    What the next pass does within a budget (`Signatures.recording`):

    | is_due | plan | |
    |---|---|---|
    | yes | none | is watched, and the pass after its step gets a plan |
    | yes | one | is watched; while it awaits its backward pass, others follow the plan without advice |
    | no | none | holds elsewhere what it saves beyond the budget: there can be no plan |
    | no | one | follows the plan |

    What decides about a pass without a budget, and about one that follows a plan:

    | teaches | advice | |
    |---|---|---|
    | yes | none | the rules, and the pass teaches advice |
    | no | some | the advice |
    | no | none | the rules: there can be no advice |
    """

    def __init__(
        self,
        kind: tuple[Any, ...],
        shapes: tuple[Any, ...] = (),
        input_bytes: int = 0,
        is_due: bool = False,
        base: "Signature | None" = None,
    ) -> None:
        self.kind = kind  # first the inputs' numbers of dimensions (None: there is no advice), last their devices
        self.shapes = shapes
        self.input_bytes = input_bytes
        self.is_due = is_due  # within a budget: a step is to be watched
        self.base = base or self  # the one of all passes with these inputs
        self.coming: Signature | None = None  # of passes before which no parameter has a gradient: see `Plans`
        self.watch: Watch | None = None  # the last step that was watched, until it is planned
        self.backward: Backward | None = None  # of the last pass, if no backward pass has followed the watched one
        self.lost_count = 0  # watched passes without a backward pass: each time, a pass further after the next is due
        self.skip_count = 0  # passes until then
        self.plan: Plan | None = None
        self.lender: Signature | None = None  # of another size, which the plan was made for
        self.advice: Advice | None = None
        self.teaches = True  # the next pass is to teach advice
        self.kept: Sequence[KeptTensor] = ()  # by the last pass that was not like earlier ones
        self.pass_count = 0
        self.exceeded_bytes = 0  # bytes of the results of a plan that were too few for a pass, until there are more
        self.try_count = 0  # steps that were watched since
        self.stray_count = 0  # passes that have left the plan, before one that has followed it
        self.slack = 0  # bytes of results that a pass may make too early, as experts with more tokens than others do
        # Without a budget, of passes that have taught advice, or should have
        self.most_bytes = 0  # of inputs of such a pass
        self.most_nodes = 0  # of a pass that had a longer graph than such ones
        self.functions = frozenset[Any]()  # of calls that such passes lack
        self.is_unlike = False  # the last pass had more nodes, or a new function: the next one teaches

    @property
    def has_own_plan(self) -> bool:
        """Whether it has a plan that was made for this size."""
        return self.plan is not None and self.lender is None

    def is_near(self, lender: "Signature") -> bool:
        """Whether another size is equal or a little larger, so that no plan of its own would be much faster."""
        return self.input_bytes <= lender.input_bytes <= _NEAR * self.input_bytes

    def may_borrow(self) -> bool:
        """Whether it is new, or follows the plan of a far size, in place of which it may have a plan of its own."""
        if self.lender is None:
            return self.is_due and self.plan is None
        return not (self.is_due or self.is_near(self.lender))

    def renew_advice(self, pass_bytes: int) -> None:
        """Without a budget: let the next pass, with inputs of so many bytes, teach advice if it must."""
        if self.must_teach(pass_bytes):
            self.most_bytes = max(self.most_bytes, pass_bytes)
            self.is_unlike = False
            self.forget_advice()

    def must_teach(self, pass_bytes: int) -> bool:
        """Whether the next pass, with inputs of so many bytes, teaches advice.

        Passes k + 2**k do, so that no unusual pass decides for long (3, 6, 11, 20, 37, …: what comes every second or
        fourth pass is not met alone). So do those with over twice the inputs of earlier such passes, or after a pass
        with calls that these lack: of another function, or for a longer graph than any pass before.
        """
        number = self.pass_count + 1
        k = number.bit_length() - 1
        return self.is_unlike or number == k + 2**k or pass_bytes > 2 * self.most_bytes

    def note_differences(self, node_count: int, functions: Iterable[Any]) -> None:
        """Note what a pass had that the advice lacks: the nodes of a longer graph, and functions of new calls."""
        new_functions = frozenset(functions) - self.functions
        self.is_unlike = node_count > self.most_nodes or bool(new_functions)
        self.most_nodes = max(self.most_nodes, node_count)
        self.functions |= new_functions

    def forget_advice(self) -> None:
        self.advice = None
        self.teaches = True

    def follow(self, plan: Plan | None) -> None:
        """Let the next pass follow a plan, and teach advice."""
        self.plan = plan
        self.lender = None
        self.forget_advice()
        self.is_due = False
        self.stray_count = 0

    def follow_own(self, plans: Plans | None) -> None:
        """Let passes follow plans that were made for this size; None: there can be none.

        If a pass has made more than these plans know of, too, a few further steps are watched to meet one like it.
        """
        plan, coming_plan = (None, None) if plans is None else plans
        self.follow(plan)
        self.set_coming(None if coming_plan is plan else coming_plan)
        is_smaller = plan is not None and plan.bytes < MORE * self.exceeded_bytes
        self.is_due = is_smaller and self.try_count < _TRIES
        self.try_count = self.try_count + 1 if self.is_due else 0
        if not self.is_due:
            self.exceeded_bytes = 0

    def borrow(self, lender: "Signature") -> None:
        """Follow the plan of another size."""
        self.follow(lender.plan)
        self.lender = lender
        self.set_coming(None if lender.coming is None else lender.coming.plan)

    def exchange_plans(self, plan: Plan, coming_plan: Plan) -> None:
        """Follow other plans of the same calls, which these plans lack."""
        calls = () if self.plan is None else self.plan.calls
        self.plan = replace(plan, calls=calls)
        self.forget_advice()
        self.set_coming(None if coming_plan == plan else replace(coming_plan, calls=calls))

    def set_coming(self, plan: Plan | None) -> None:
        """Give passes before which no parameter has a gradient a plan of their own; None: they have none."""
        self.coming = None
        if plan is not None:
            self.coming = Signature(self.kind, base=self)
            self.coming.follow(plan)

    def awaits_backward(self) -> bool:
        """Whether the pass that was watched, or one after it, still waits for its backward pass."""
        if self.watch is not None:
            return self.watch.is_awaited()
        return self.backward is not None and (self.skip_count > 0 or not self.backward.has_begun)

    def note_lost(self) -> None:
        """Note that the watched pass had no backward pass: a GAN's generator makes images for its discriminator so."""
        self.backward = Backward(None)  # which no graph has
        self.skip_count = self.lost_count
        self.lost_count += 1

    def note_unwatched(self, output: object) -> None:
        """A pass has ended that was not watched, although a step is due."""
        if self.backward is not None and self.backward.has_begun:
            self.skip_count -= 1
        else:
            self.backward = Backward(output)
