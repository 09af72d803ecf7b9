"""The scripts of a prepared network: one for each form of its inputs; with a budget also for each plan."""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from ...saved import PLAIN, autocast_of, is_ordinary
from ...torch_internals import is_any_autocast_enabled, is_capturing
from ..entries.entry import Script
from ..entries.plan import ByPlan

_MOST = (
    16  # forms of inputs whose scripts are kept; also plans of a form, and recorded passes from which one is learned
)
_SIMPLE = (bool, str, type(None))


class InputForm:
    """The scripts for inputs of one form: dimensions, dtypes, devices, modes."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.now: Script | None = None  # of the last pass that could follow one
        self.lessons = 0
        self.learns = True  # the next pass is recorded, to learn from it
        self.policy: ByPlan | None = None  # of the last pass that was learned from

    def learn(self, script: Script | None) -> None:
        """A pass has been recorded. None: there can be no script."""
        self.lessons += 1
        self.learns = False
        if script is not None:
            self.scripts = [script]
            self.now = script

    def grow(self, script: Script, grown: Script | None) -> None:
        """A pass has differed from a script. None: it could learn nothing new."""
        if grown is not None:
            self.scripts = [grown if one is script else one for one in self.scripts]
            self.now = grown

    def left(self) -> None:
        """A pass has left all scripts: its path may be learned."""
        self.learns = self.lessons < _MOST


class InputForms:
    """The last forms of inputs of a network. `sizes`: each size has its own, as plans do; scripts hold for all."""

    def __init__(self, sizes: bool) -> None:
        self._sizes = sizes
        self._forms: dict[Hashable, InputForm] = {}
        self._parameters: list[Any] = []

    def of(self, module: nn.Module, inputs: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> InputForm | None:
        """The form of these inputs; None if there are no scripts for tensors like them."""
        if not PLAIN.issuperset(map(type, inputs)) or not all(map(is_ordinary, inputs)):
            return None
        key = self._key(module, inputs, args, kwargs)
        form = self._forms.pop(key, None)
        if form is None:
            form = InputForm()
            if len(self._forms) >= _MOST:
                del self._forms[next(iter(self._forms))]
        self._forms[key] = form  # the last one used comes last
        return form

    def _frozen(self, module: nn.Module) -> tuple[bool, ...]:
        """Which parameters need gradients. They are not looked for again while they exist."""
        if self._parameters:
            try:
                return tuple([reference().requires_grad for reference in self._parameters])
            except AttributeError:  # None: one has been replaced
                pass
        self._parameters = [weakref.ref(one) for one in module.parameters()]
        return tuple([one.requires_grad for one in module.parameters()])

    def _key(self, module: nn.Module, inputs: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Hashable:
        """It need not tell everything, because a script notices what differs. It tells what plans depend on."""
        return (
            tuple([(one.dim(), one.dtype, one.device, one.requires_grad) for one in inputs]),
            self._sizes and tuple([(one.shape, one.stride()) for one in inputs]),
            tuple([one if isinstance(one, _SIMPLE) else 0 for one in args]),
            tuple([(name, one if isinstance(one, _SIMPLE) else 0) for name, one in kwargs.items()]),
            self._frozen(module),
            module.training,
            is_capturing(),
            is_any_autocast_enabled() and tuple([autocast_of(one) for one in {one.device.type for one in inputs}]),
        )
