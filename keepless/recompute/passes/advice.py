"""What earlier passes teach about a call: what is worth doing with its tensors (rule 14 in recording.py).

Each call of a pass belongs to a *site*, a place in the program, which remembers what the rules or a plan have decided
about its calls before, as bits. Wrong bits cost memory or time, but change no gradient: tests scramble them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..table.functions import Row
from .plan import MORE

# Advice about the calls of a site, as bits. None: leave them alone.
HOOKS = 1  # set hooks around them: they save tensors that are dropped, or read by recipes
DROP = 2  # give their results recipes
SIGNS = 4  # keep only sign masks of the tensors that they save and that no recipe computes
RULES = 8  # ask the rules, because they drop what a call saves inside
MASK = 16  # with RULES: draw the mask of a dropout again
FLAT = 32  # their results had no gradient; with COUNT
MEMORY = 64  # note the memory of their results: recipes read it uncopied
KEEP = 2048  # keep their results themselves: recipes would read copies, or compute them from nodes or bases
COUNT = 128  # count the bytes of their results, as there is a budget
UNKNOWN = 256  # nothing is known yet: ask the rules, and learn
HIDDEN = 512  # with UNKNOWN: other hooks or modes have hidden a call
ADDED = 1024  # the first pass had no such call
DERIVE = 4096  # they save copies of their first argument that are computed from it; the next bits: of the second, …
MOST_DERIVED = 8  # arguments
ANY_DERIVED = DERIVE * (2**MOST_DERIVED - 1)

_NEAR = 8  # a call that does not come next is sought among so many sites, as others may be missing
_GROWS = 4  # advice grows to at most about so many times the sites of its first pass


@dataclass(eq=False, repr=False, slots=True)
class Site:
    """A place in the program where a function is called."""

    function: Any  # None: no call
    row: Row
    number: int  # order in the first pass
    nodes_before: int  # that autograd had made before it, and calls that had cut the graph
    parameter_id: int = 0  # of the first one that it reads (programs may swap them: no reference)
    advice: int = UNKNOWN
    most_bytes: int = -1  # bytes of counted results up to its own that a pass may make; -1: not known yet
    branches: "dict[Any, Site] | None" = None  # others that have come next, by their functions
    next: "Site" = field(init=False)  # the one that has come next
    writes: int = field(init=False)  # the row's, beside the advice: every call reads both

    def __post_init__(self) -> None:
        self.next = self
        self.writes = self.row.writes


NOWHERE = -1  # number of sites without a place: see `Advice.no_grad_sites`
NO_SITE = Site(None, Row(), NOWHERE, 0, advice=0)


class Advice:
    """The sites of a network's passes with inputs of one kind. All such passes share it, also in several threads."""

    def __init__(self) -> None:
        self.root = Site(None, Row(), 0, 0)
        self.root.next = self.end = Site(None, Row(), NOWHERE, 0, advice=0)  # before the first call, after the last
        self.is_new = True  # until its first pass has ended
        # Calls under `no_grad` have no place, as their number may vary: one site for all of a function, and no bytes.
        self.no_grad_sites: dict[Any, Site] = {}
        self.readers: dict[int, Site] = {}  # by id of a parameter: the first site that reads it (another does no harm)
        self.first_count = 0  # of sites after the first pass
        self.site_count = 0  # of sites now
        self.has_hooks = False  # hooks are around the whole pass, as dropped tensors are saved outside of calls
        # Of the first pass
        self.node_count = 0  # nodes that autograd made
        self.result_bytes = 0  # of counted results
        self.added_nodes = 0  # of calls that were added later

    def find_site(self, last_site: Site, function: Callable[..., Any], args: tuple[Any, ...]) -> Site | None:
        """The site of a call that does not come next: other calls may be missing, or new."""
        parameter_id = first_parameter_id(args)
        branch = None if last_site.branches is None else last_site.branches.get(function)
        if branch is not None and branch.parameter_id == parameter_id:
            return branch
        site = self.readers.get(parameter_id)
        if site is not None and site.function == function:
            return site
        if branch is not None:
            return branch
        site = last_site
        for _ in range(_NEAR + 1):
            site = site.next
            if site.function == function:  # also the next one: each `x.requires_grad = …` is a new object
                return site
        return None

    def add_site(
        self, last_site: Site, function: Callable[..., Any], row: Row, args: tuple[Any, ...], nodes_before: int
    ) -> Site:
        """A new site after another one. `nodes_before`: see `Site.nodes_before`; of use in the first pass alone."""
        site = Site(function, row, self.site_count, nodes_before, first_parameter_id(args))
        site.next = last_site.next
        if not self.is_new:
            site.number = last_site.number
            site.nodes_before = last_site.next.nodes_before
            site.advice |= ADDED
            site.most_bytes = int(MORE * self.result_bytes)  # instead of calls that are missing
            if self.site_count > _GROWS * self.first_count:
                return site  # for this pass alone, which no later one finds
        if self.is_new or last_site.advice & UNKNOWN:
            last_site.next = site
        else:
            last_site.branches = {**(last_site.branches or {}), function: site}
        if site.parameter_id:
            self.readers.setdefault(site.parameter_id, site)
        self.site_count += 1
        return site


def derived_from(arguments: Sequence[Any], argument: object) -> int:
    """The bits for copies of an argument: see `DERIVE`."""
    if argument is None:
        return 0
    return sum([DERIVE << n for n, candidate in enumerate(arguments[:MOST_DERIVED]) if candidate is argument])


def first_parameter_id(args: tuple[Any, ...]) -> int:
    """The id of the first parameter that a call reads; 0 if it reads none."""
    for argument in args:
        if isinstance(argument, nn.Parameter):
            return id(argument)
    return 0
