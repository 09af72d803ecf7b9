"""Start a run from the weights in a file, `init.weights`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from engine import checkpoint
from engine.config import group_from_plain
from engine.schema.network import NORMS, PackageNorm
from engine.schema.training import TrainingRun
from models.layers import from_released

SHOWN_NAMES = 4  # tensors listed per reason


class Initialised(NamedTuple):
    """The report of `initialise_from`."""

    source: str  # file, step, and which weights
    matched: list[str]  # the network's tensors that were loaded
    skipped: dict[str, str]  # tensor in the file -> why it was not used
    new: list[str]  # the network's tensors that keep their random initialisation

    def __str__(self) -> str:
        lines = [
            f"starts from {self.source}: {len(self.matched)} tensors matched, {len(self.skipped)} skipped, "
            f"{len(self.new)} new"
        ]
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, why in self.skipped.items() if why == reason]
            lines.append(f"  skipped {_listed(names)}: {reason}")
        if self.new:
            lines.append(f"  new {_listed(self.new)}")
        return "\n".join(lines)


class _Weights(NamedTuple):
    tensors: dict[str, Tensor]
    source: str
    classes: list[str] | None = None  # None: the file does not name them
    package_eps: float | None = None  # of the released package's norms, whose scale is |weight| + eps


def initialise(config: TrainingRun, network: nn.Module, classes: Sequence[str]) -> Initialised:
    """Load the weights of `config.init`. ValueError: see `initialise_from`."""
    assert config.init.weights is not None
    path = Path(config.init.weights).expanduser()
    package = isinstance(config.norm, PackageNorm)
    return initialise_from(network, path, classes, format=config.init.format, part=config.init.part, package=package)


def initialise_from(
    network: nn.Module,
    path: Path,
    classes: Sequence[str],
    *,
    format: str | None = None,
    part: str = "network",
    package: bool = False,
) -> Initialised:
    """Load weights by name and shape. The whole body must match, and the whole head if the file has one.

    Weights mean the same in standard, checkpointed and in-place norms; the released package's are converted. The
    classifier `cls` is loaded if it has the same classes in the same order; otherwise it stays random.

    Args:
        network: with its random initialisation.
        path: a checkpoint, whose averaged weights are preferred, or another file in `format`.
        classes: names of the classes that the network will learn.
        format: None for a checkpoint of this project. "standard_bn" for a state dict {name: tensor} under our names, of
            a network with standard batch normalisation or of its body. It may be stored under the key "state_dict", and
            its names may start with "module.".
        part: "body" leaves head and classifier random; "network" loads everything.
        package: whether the network has the released package's norms.

    Raises:
        ValueError: the file cannot be read, has another format, or does not fit; the network is unchanged.
    """
    content = checkpoint.read(path)
    weights = _of_checkpoint(content, path) if format is None else _of_other_program(content, path, format)
    own = network.state_dict()
    tensors = _named_as_in(own, _scaled_for(package, weights, path))
    skipped = {}
    for name, tensor in tensors.items():
        reason = _reason_to_skip(name, tensor, part, weights.classes, list(classes))
        if reason is not None:
            skipped[name] = reason
    wanted = {name: tensor for name, tensor in tensors.items() if name not in skipped}

    new = [name for name in own if name not in wanted]
    with_head = any(name.startswith("head.") for name in wanted)
    misfits = [f"{name} has no place in the network" for name in wanted if name not in own]
    for name, tensor in wanted.items():
        if name in own and own[name].shape != tensor.shape:
            misfits.append(f"{name} is {_shape(tensor)} in the file and {_shape(own[name])} in the network")
    misfits += [f"{name} is not in the file" for name in new if _must_be_given(name, with_head)]
    if misfits:
        raise ValueError(
            f"init.weights={path} does not fit the network: {_listed(misfits, '; ')}. Give the body, head and "
            f"norm.learn_scale that it was trained with, or init.part=body if only the head differs"
        )
    network.load_state_dict({**own, **wanted})
    return Initialised(weights.source, list(wanted), skipped, new)


def _of_checkpoint(content: object, path: Path) -> _Weights:
    if not _is_ours(content):
        raise ValueError(
            f"init.weights={path} is not a checkpoint of this project: give init.format=standard_bn if it is a state "
            f"dict with standard batch normalisation under our names; other formats cannot be loaded yet"
        )
    state = checkpoint.checked(content, path)
    norm = group_from_plain(state["config"], "norm", NORMS, f"init.weights={path}")
    averaged = "ema" in state
    return _Weights(
        state["ema" if averaged else "network"],
        f"{path}, step {state['step']}{', averaged weights (EMA)' if averaged else ''}",
        list(state["classes"]),
        norm.eps if isinstance(norm, PackageNorm) else None,
    )


def _of_other_program(content: object, path: Path, format: str) -> _Weights:
    assert format == "standard_bn", format
    if _is_ours(content):
        raise ValueError(f"init.weights={path} is a checkpoint of this project: leave init.format out")
    tensors = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(
            f"init.weights={path} with init.format=standard_bn: expected a state dict {{name: tensor}}, possibly "
            f"below the key state_dict"
        )
    if all(name.startswith("module.") for name in tensors):  # of DataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return _Weights(tensors, f"{path} (standard_bn)")


def _is_ours(content: object) -> bool:
    return isinstance(content, dict) and "format" in content


def _named_as_in(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the prefix that a body has in a whole network, if the tensors are of a body alone."""
    if tensors.keys() & own.keys() or any(name.startswith(("body.", "head.", "cls.")) for name in tensors):
        return tensors
    return {f"body.{name}": tensor for name, tensor in tensors.items()}


def _scaled_for(package: bool, weights: _Weights, path: Path) -> dict[str, Tensor]:
    """The tensors, with norm scales as the network parametrises them."""
    eps = weights.package_eps
    if package and eps is None:
        raise ValueError(
            f"init.weights={path} with norm=package: the released package cannot represent scales below its eps, so "
            f"it cannot load other norms; give norm=inplace"
        )
    if package or eps is None:
        return weights.tensors
    return from_released(weights.tensors, eps)


def _reason_to_skip(name: str, tensor: Tensor, part: str, trained: list[str] | None, classes: list[str]) -> str | None:
    if part == "body" and not name.startswith("body."):
        return "init.part=body"
    if name.startswith("body.classifier."):
        return "it classifies whole images"
    if not name.startswith("cls."):
        return None
    if len(tensor) != len(classes):
        return f"for {len(tensor)} classes: expected {len(classes)}"
    if trained is not None and trained != classes:
        there, here = next(pair for pair in zip(trained, classes, strict=True) if pair[0] != pair[1])
        return f"for other classes, such as {there} in place of {here}"
    return None


def _must_be_given(name: str, with_head: bool) -> bool:
    if name.endswith("num_batches_tracked"):  # used only without momentum; older programs did not save it
        return False
    return name.startswith("body.") or (with_head and name.startswith("head."))


def _listed(entries: list[str], separator: str = ", ") -> str:
    more = f" and {len(entries) - SHOWN_NAMES} more" if len(entries) > SHOWN_NAMES else ""
    return separator.join(entries[:SHOWN_NAMES]) + more


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
