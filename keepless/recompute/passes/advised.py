"""Record a pass with the advice of earlier ones: most calls run as they are, and few questions are asked again."""

from collections.abc import Sequence
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import PLAIN, Kept, is_ordinary
from ...torch_internals import (
    current_hooks,
    dispatch_modes_on,
    hooks_are_allowed,
    is_observed,
    next_node_number,
    pop_hooks,
    push_hooks,
    transform_level,
    unpack,
)
from ..held.calls import Call
from ..held.values import Recipe, Saved, Value
from ..table.functions import EXPOSE, Row, row_of
from ..table.rules import NotRepeated, Rule
from ..table.writes import FIRST, INPLACE, may_overwrite
from . import advice as bits
from .advice import COUNT, DROP, FLAT, HOOKS, KEEP, MEMORY, NO_SITE, NOWHERE, SIGNS, Advice, Site
from .finder import DERIVING, Finder, derive_by_advice
from .learning import Note, saves_dropped_outside_calls
from .packing import is_simple, make_holder, make_sign_mask
from .plan import MORE, ByPlan, Flag
from .recipes import DEEPEST, give_planned_recipes, may_drop, read_result_instead
from .recording import SETS_DATA, Recording, saved_tensors_hooks
from .registry import NOT_KNOWN
from .report import KeptTensor

_SHARE = 4  # a pass leaves its plan if more than one call in so many is new; missing calls do not count
_SEQUENCES = frozenset([list, tuple])
_BY_RULES = bits.RULES | bits.UNKNOWN
_SAVES = HOOKS | DROP
_BUSY = ~COUNT
_AFTERWARDS = KEEP | COUNT
_DERIVED = bits.ANY_DERIVED
# Names of this module are found faster than attributes.
strided = torch.strided
Parameter = nn.Parameter
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled


class Advised(Recording):
    """Context of a forward pass whose calls have advice, or teach it: see rule 14 in recording.py.

    `advice`: of earlier passes with such inputs; new: the rules decide about all calls. `earlier`: what these passes
    have kept, for the report.
    """

    def __init__(
        self,
        advice: Advice,
        policy: ByPlan | None = None,
        *,
        inputs: Sequence[Tensor] = (),
        frame: FrameType | None = None,
        earlier: Sequence[KeptTensor] = (),
    ):
        super().__init__(policy, inputs=inputs, frame=frame)
        self.advice = advice
        self.earlier = earlier
        self.slack = 0 if policy is None else policy.slack
        self.is_first = advice.is_new
        self.no_grad_sites = advice.no_grad_sites
        self.last_site: Site = advice.root  # of the last call
        self.has_left_plan = False  # too many calls are new for the plan to hold: record the rest of the pass
        self.is_learnable = True
        self.has_strayed = False  # some calls were not in the first pass
        self.reveals_calls = False  # a call was hidden in earlier passes, or had no gradient
        self.difference_count = 0  # new calls, and returns to earlier sites
        self.node_count = self.result_bytes = 0  # made in this pass: nodes of autograd; bytes of counted results
        self.cut_count = 0  # calls such as `detach` that got tensors with a gradient, and have returned one without
        self.skipped_nodes = 0  # nodes and cuts of missing calls
        self.notes: list[Note] = []
        self.unknown_sites: list[Site] = []
        # The running call
        self.site: Site = NO_SITE
        self.saved_leaves: list[Tensor] = []  # such as parameters
        self.result_candidates: list[tuple[Tensor, Value]] = []  # saved tensors that may be its result, and values
        self.arguments: tuple[Any, ...] = ()

    def __enter__(self) -> "Advised":
        super().__enter__()
        self.registry.log.is_on = self.is_first  # else `earlier` says what is kept
        self.packing = self.pack  # a bound method, made once
        self.find = Finder(self.registry, saved_leaves=self.saved_leaves)
        return self

    def start_hooks(self) -> None:
        if self.is_first or self.advice.has_hooks:
            super().start_hooks()

    def forget(self, has_raised: bool) -> None:
        self.node_count = next_node_number() - self.registry.storages.first_node_number
        if not self.is_first:
            self._count_skipped(self.advice.end)
        super().forget(has_raised)
        if not (self.is_first or self.has_left_plan):
            self.kept = [*self.earlier, *self.kept]
        self.last_site = NO_SITE  # after Ctrl-C, it may still see calls
        self.no_grad_sites = {}
        self.__dict__.pop("packing", None)  # PyTorch holds it, and so this object, as long as the graph
        self.saved_leaves.clear()
        self.result_candidates.clear()
        self.arguments = ()

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _is_compiling():
            return function(*args, **(kwargs or {}))
        has_place = _is_grad_enabled()
        site = self.last_site.next if has_place else self.no_grad_sites.get(function, NO_SITE)
        if site.function is function and (not types or PLAIN.issuperset(types)):
            if has_place:
                self.last_site = site
            if not (site.advice & _BUSY or site.writes) and not (kwargs and "out" in kwargs):
                result = function(*args, **kwargs) if kwargs else function(*args)
                if site.advice:
                    self.count_bytes(result)
                return result
            return self.run_by_advice(site, function, args, kwargs or {})
        if row_of(function).only_asks and PLAIN.issuperset(types):
            return function(*args, **kwargs) if kwargs else function(*args)
        return self.see(function, types, args, kwargs or {})

    def record(self, function: Any, row: Row, are_plain: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not the next one."""
        if self.dispatch_mode_count and is_observed():
            return function(*args, **kwargs)
        if not are_plain or function in EXPOSE or function == SETS_DATA:
            self.is_learnable = self.is_learnable and are_plain
            return self.run_by_rules_with_hooks(Call(function, row, args, kwargs))
        if self.elsewhere is not None:
            result = self.run_by_rules_with_hooks(Call(function, row, args, kwargs))
            if not (isinstance(result, Tensor) and result._is_view()):
                self.count_bytes(result)
            return result
        if not _is_grad_enabled():
            no_grad_site = self.no_grad_sites.setdefault(function, Site(function, row, NOWHERE, 0))
            return self.run_by_advice(no_grad_site, function, args, kwargs)
        self.last_site = self._go_to_site(function, row, args)
        return self.run_by_advice(self.last_site, function, args, kwargs)

    def _go_to_site(self, function: Any, row: Row, args: tuple[Any, ...]) -> Site:
        """Find the site of a call that does not come next, or add one. Count what is new or missing in this pass."""
        advice = self.advice
        site = None
        if not (self.is_first or self.has_left_plan):
            site = advice.find_site(self.last_site, function, args)
            self._count_difference(site)
        if site is None or self.has_left_plan:
            if not self.is_first and function in self.no_grad_sites:  # it may have had no gradient
                self.reveals_calls = True
            nodes_before = next_node_number() - self.registry.storages.first_node_number + self.cut_count
            site = advice.add_site(self.last_site, function, row, args, nodes_before)
        if self.has_left_plan:
            site.next = advice.end  # every further call gets a new site
        return site

    def _count_difference(self, site: Site | None) -> None:
        """Count what is new or missing as the pass goes on at this site (None: a new one). Too much ends its plan."""
        if site is None or site.number < self.last_site.number:
            self.difference_count += 1
            self.has_left_plan = self.policy is not None and _SHARE * self.difference_count > self.advice.first_count
        if site is not None:
            self._count_skipped(site)

    def _count_skipped(self, site: Site) -> None:
        """Count what the calls between the last one and this site would have made, as the pass goes on there.

        A missing cut counts, too, because what follows has a longer graph, though it makes no more nodes.
        """
        self.skipped_nodes += site.nodes_before - self.last_site.next.nodes_before

    def run_by_advice(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as its site advises."""
        advice = site.advice
        if advice & bits.ADDED:
            self.has_strayed = True
        saves = advice & _SAVES
        asks_rules = advice & _BY_RULES or (kwargs and "out" in kwargs)
        if saves and not asks_rules:  # they are asked also about a call that a transform, a mode or hooks hide
            has_modes = transform_level() is not None or dispatch_modes_on() != self.dispatch_mode_count
            asks_rules = has_modes or not (current_hooks() is None or self.is_innermost())
        if asks_rules:
            result = self._run_by_rules_at(site, function, args, kwargs)
            advice = site.advice
        elif (
            site.writes
            and (site.writes == FIRST or may_overwrite(function, args, kwargs))
            # A norm's `count.add_(1)` needs no care.
            and (saves or len(args) == 1 or kwargs or not _is_number(args[0]))
        ):
            result = self._run_in_place(site, function, args, kwargs)
        else:
            result = self._run_with_hooks(site, function, args, kwargs) if advice & HOOKS else function(*args, **kwargs)
            if advice & DROP:
                self._give_own_recipe(site, args, kwargs, result)
                if self.saved_leaves or self.result_candidates:
                    self._finish_saving()
            if advice & MEMORY:
                self.registry.storages.note_made((*args, *kwargs.values()), result, site)
        if advice & _AFTERWARDS:
            if advice & KEEP and isinstance(result, Tensor) and not self.registry.storages.may_change_unseen(result):
                if self.registry.find_value(result) is None:
                    self.registry.keep_by_advice(result)
            if advice & COUNT:
                if type(result) is Tensor and not advice & FLAT and result.layout is strided:
                    self.result_bytes += result.nbytes
                    if self.result_bytes > site.most_bytes:
                        self._handle_excess(site, result.nbytes)
                else:
                    self.count_bytes(result)
        return result

    def count_bytes(self, result: Any) -> None:
        """Count the bytes of a result, tensors alone or in tuples. If there are too many, hold the rest elsewhere."""
        if type(result) is not Tensor:
            for part in result if isinstance(result, (tuple, list)) else ():
                self.count_bytes(part)
            return
        if result.layout is not strided:
            return
        self.result_bytes += result.nbytes
        if self.last_site.advice & FLAT and result.requires_grad and not self.is_first:  # unlike in earlier passes
            self.reveals_calls = True
            if self.elsewhere is None:
                self.hold_elsewhere(0, result.nbytes)
                self.last_site = self.advice.end
        if self.result_bytes > self.last_site.most_bytes:
            self._handle_excess(self.last_site, result.nbytes)

    def _handle_excess(self, site: Site, size: int) -> None:
        """Results take more bytes than in the first pass: hold the rest elsewhere. The first pass notes how many.

        `size`: bytes of the last result.
        """
        if self.is_first:
            site.most_bytes = int(MORE * self.result_bytes)
        elif self.elsewhere is None and self.result_bytes > site.most_bytes + self.slack:
            self.hold_elsewhere(self.result_bytes - site.most_bytes, size)
            self.last_site = self.advice.end  # no further call has a site

    # Calls about which the rules decide

    def _run_by_rules_at(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call about which its site does not say enough."""
        call = Call(function, site.row, args, kwargs)
        call.site = site
        call.is_advised = not site.advice & bits.UNKNOWN
        result = self.run_by_rules_with_hooks(call)
        if site.advice & bits.UNKNOWN and site.advice & bits.ADDED:
            self.advice.added_nodes += next_node_number() - call.first_node_number
        return result

    def run_by_rules_with_hooks(self, call: Call) -> Any:
        """`run_by_rules` with hooks around the call, unless there are hooks already, or they are disabled."""
        registry = self.registry
        if not call.is_advised:
            registry.storages.note_unnoted()
        if self.hooks is not None or not (current_hooks() is None and hooks_are_allowed()):
            return self.run_by_rules(call)
        hooks = saved_tensors_hooks(self.pack_hook(), unpack)
        was_on = registry.log.is_on
        self.hooks = hooks
        registry.log.is_on = not call.is_advised
        try:
            hooks.__enter__()  # inside the try, because Ctrl-C may come right after it
            return self.run_by_rules(call)
        finally:
            hooks.__exit__()
            self.hooks = None
            registry.log.is_on = was_on

    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        """Decide whether a result gets a recipe: as its site advises, or by the rules if it does not."""
        if not call.is_advised:
            super().decide(rule, call, result)
            return
        registry = self.registry
        advice = call.site.advice
        planned = (Flag.AGAIN if advice & DROP else 0) | (Flag.MASK if advice & bits.MASK else 0)
        value = give_planned_recipes(registry, planned, rule, call, result, DEEPEST)
        if self.policy is None:
            return
        value = value or registry.find_value(result)
        if value is not None or call.replaceable:  # otherwise it is kept once a recipe reads it
            read_result_instead(registry, call, result, value or registry.keep(result))

    def note_conclusion(self, call: Call, result: Any, is_hidden: bool = False) -> None:
        """Note what a call teaches about which nothing was known."""
        site: Site | None = call.site
        if site is None or call.is_advised:
            return
        if site.number == NOWHERE:
            self.unknown_sites.append(site)
            return
        if is_hidden:
            site.advice |= bits.HIDDEN
            return
        self.reveals_calls = self.reveals_calls or bool(site.advice & bits.HIDDEN)
        self.unknown_sites.append(site)
        is_view = isinstance(result, Tensor) and result._is_view()
        if isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad:
            inputs = tensors_in(call.arguments)
            if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs]):
                self.cut_count += 1
        if self.registry.by_plan and not is_view and (self.is_first or call.packed or call.recipes):
            site.advice |= COUNT | (0 if getattr(result, "requires_grad", True) else FLAT)
        note = Note(call, result, self.registry.find_value)
        if not note.is_empty:
            self.notes.append(note)

    def learn(self, fits: bool) -> None:
        """Set the advice of sites that were unknown, once the pass has ended: now it is certain what it drops.

        `fits`: see `Plan.fits`.
        """
        advice = self.advice
        if self.is_first:
            self._note_totals()
        for site in self.unknown_sites:
            site.advice &= COUNT | FLAT | MEMORY | bits.ADDED
        if not (fits and self.is_first):
            for note in self.notes:
                note.set_advice()
        if advice.is_new:
            advice.is_new = False
            advice.first_count = advice.site_count
        self.notes = []
        self.unknown_sites = []

    def _note_totals(self) -> None:
        """Note what the first pass has made, with which later ones are compared (rule 15)."""
        advice = self.advice
        advice.has_hooks = saves_dropped_outside_calls(self.registry.saved_outside)
        advice.node_count = self.node_count
        advice.end.nodes_before = self.node_count + self.cut_count
        scale = 1 / self.growth if 0 < self.growth < 1 else 1.0  # as many bytes as planned are within the budget
        advice.result_bytes = int(scale * self.result_bytes)
        most = 0
        site = advice.root.next
        while site is not advice.end:
            most = max(int(scale * site.most_bytes), most)
            site.most_bytes = most
            site = site.next

    @property
    def has_followed(self) -> bool:
        """Whether the pass was as earlier ones were."""
        return not (self.is_first or self.difference_count or self.unknown_sites or self.is_outdated)

    @property
    def is_outdated(self) -> bool:
        """Whether the pass has made more than earlier ones: nodes, larger results, or calls that were hidden there."""
        if self.is_first:
            return False
        if self.reveals_calls:
            return True
        nodes = self.advice.node_count - self.skipped_nodes + (self.advice.added_nodes if self.has_strayed else 0)
        return self.node_count > nodes or self.growth > MORE

    @property
    def growth(self) -> float:
        return super().growth if self.is_first else self.result_bytes / max(self.advice.result_bytes, 1)

    # Calls that drop their results, or save dropped tensors

    def _run_with_hooks(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with our hooks, or without if hooks are disabled."""
        self.site = site
        self.arguments = args
        if site.advice & _DERIVED:
            self.registry.call = call = Call(function, site.row, args, kwargs)
            call.site = site
            call.is_advised = True
            call.overwrites = bool(site.writes)
        is_pushed = True
        try:
            try:
                push_hooks(self.packing, unpack)  # inside both, because Ctrl-C may come right before or after it
            except RuntimeError:
                is_pushed = False
            result = function(*args, **kwargs)
            if is_pushed:
                pop_hooks()
            return result
        except BaseException:
            self._finish_saving()
            hooks = current_hooks()
            if hooks is not None and hooks[0] is self.packing:
                pop_hooks()
            raise
        finally:
            self.arguments = ()
            self.registry.call = None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that the running call saves."""
        registry = self.registry
        site = self.site
        if type(tensor) is Parameter or type(tensor._base) is Parameter:
            if site.advice & DROP:
                self.saved_leaves.append(tensor)
            return Kept(tensor, None, detaches=False)
        if registry.storages.exposed.by_address and registry.storages.may_change_unseen(tensor):
            return make_holder(registry, tensor)
        reference, version, value = registry.by_id.get(id(tensor), NOT_KNOWN)
        if value is None or reference() is not tensor or version != tensor._version:
            value = None
            if not tensor.requires_grad:
                if (tensor.ndim > 1 or tensor.numel() >= registry.short_length) and not is_simple(registry, tensor):
                    registry.keep_by_advice(tensor)  # recipes may read it uncopied, as it must not change anyway
                return Kept(tensor, None, detaches=False)
            if self._may_be_derived(tensor):
                value = derive_by_advice(registry, tensor)
        advice = site.advice
        is_kept = value is not None and type(value.source) is Kept  # its `Kept` may be detached, for recipes
        if value is None and advice & SIGNS:
            value = make_sign_mask(registry, tensor, site.row.positive)
        if value is not None and not is_kept:
            return Saved(value, registry.storages.memories, tensor)
        # An argument is held itself, unless it may be the call's own result, which would keep itself alive.
        for argument in self.arguments[1:] if site.writes else self.arguments:
            if argument is tensor or (type(argument) in _SEQUENCES and any([part is tensor for part in argument])):
                if advice & DROP and tensor.is_leaf:
                    self.saved_leaves.append(tensor)
                return Kept(tensor, None, detaches=False)
        if is_kept or not (advice & DROP and is_ordinary(tensor)):
            return Kept(tensor, None)
        last_tensor, value = self.result_candidates[-1] if self.result_candidates else (None, None)
        if value is None or last_tensor is not tensor:  # otherwise it is saved a second time, with the same value
            value = Value(None)
        self.result_candidates.append((tensor, value))
        return Saved(value, registry.storages.memories, tensor)

    def _may_be_derived(self, tensor: Tensor) -> bool:
        """Whether a saved tensor may be computed from a dropped base, by its node, or from an argument of the call."""
        base = tensor._base
        base_value = None if base is None else self.registry.by_id.get(id(base), NOT_KNOWN)[2]
        if base_value is not None:
            return type(base_value.source) is not Kept
        return bool(self.site.advice & _DERIVED) or type(tensor.grad_fn) in DERIVING

    def _run_in_place(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that may write over tensors."""
        registry = self.registry
        find = self.find
        find.is_memory_read = True
        target: Any = args[0] if args else None
        dropped_version: int | None = None  # of the target after the call, if its value is then to be dropped
        if type(target) in PLAIN and is_ordinary(target):
            if site.advice & DROP and _is_grad_enabled():
                dropped_version = target._version + 1
                find.before = registry.find_value(target)
                if find.before is None and (target._base is not None or type(target.grad_fn) in DERIVING):
                    find.before = derive_by_advice(registry, target)
            if target.grad_fn is not None and (site.writes == FIRST or function in INPLACE):
                value = registry.find_value(target) if dropped_version is None else find.before
                find.is_memory_read = registry.storages.is_read(target, value)
        writes = self.begin_writing(function, args, kwargs) if find.is_memory_read else []
        try:
            result = (
                self._run_with_hooks(site, function, args, kwargs) if site.advice & HOOKS else function(*args, **kwargs)
            )
            if dropped_version is not None and result is target and result._version == dropped_version:
                self._give_own_recipe(site, args, kwargs, result, is_written=True)
            if self.saved_leaves or self.result_candidates:
                self._finish_saving()
        finally:
            find.before = None
            if writes:
                self.end_writing(writes)
        return result

    def _give_own_recipe(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_written: bool = False
    ) -> None:
        """If possible, give the result of a call a recipe, made by its rule from the arguments of this very call.

        `is_written`: the call has written over its first argument, and returned it.
        """
        registry = self.registry
        if registry.freed:
            registry.settle_freed()
        rule = site.row.again
        if rule is None or type(result) not in PLAIN or result.layout is not strided or result.is_nested:
            return
        if result.grad_fn is None and not may_drop(registry, site.row, args, result):
            return
        find = self.find
        find.result = result
        try:
            again = rule(find, args, kwargs, result)
        except NotRepeated:
            return
        finally:
            find.result = None
            find.node_packs = None
        is_new = again.fresh or is_written or id(result) not in map(id, (*args, *kwargs.values()))
        if again.draws or not is_new:
            return
        value = None
        for tensor, candidate in self.result_candidates:
            if tensor is result:
                value = candidate  # autograd holds it already
        recipe = Recipe(again, result, is_wanted=value is not None)
        if recipe.depth > DEEPEST:
            return
        if value is None:
            value = Value(recipe)
        else:
            value.source = recipe
        if not (registry.storages.exposed.by_address and registry.storages.may_change_unseen(result)):
            registry.by_id[id(result)] = ref(result), result._version, value

    def _finish_saving(self) -> None:
        """The call has ended: keep what it has saved that is not its result."""
        for tensor, value in self.result_candidates:
            value.source = value.source or Kept(tensor, None)
        self.saved_leaves.clear()
        self.result_candidates.clear()


def _is_number(argument: object) -> bool:
    """Whether an argument is a whole number in a tensor, such as a count of minibatches: no recipe reads it."""
    if not isinstance(argument, Tensor) or argument.dtype is not torch.int64:
        return False
    return not argument.ndim and argument._base is None
