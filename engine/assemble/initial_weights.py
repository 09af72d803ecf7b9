"""Start a run from the weights in a file, `init.weights`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from engine.checkpoint import files as checkpoint
from engine.configuration.choices import alternatives_of, choices
from engine.configuration.config import group_from_plain
from engine.schema.network import NORMS, Norm, ReleasedNorm
from engine.schema.training import TrainingRun
from keepless import ABN, from_released
from models.checkpoints import released, torch_files
from models.checkpoints.loading import Loaded, is_of_body, is_of_classifier, load_by_name
from models.checkpoints.recognition import differences
from models.checkpoints.torchvision_names import from_torchvision


class Weights(NamedTuple):
    """What a file holds."""

    tensors: Mapping[str, Tensor]
    source: str
    classes: list[str] | None = None  # None: the file does not name them
    released_eps: float | None = None  # of released norms, whose scale is |weight| + eps
    remarks: tuple[str, ...] = ()  # for the report
    norm: Norm | None = None  # of the network; None: the file does not say

    def converted(self) -> Mapping[str, Tensor]:
        """The tensors with scales as our norms have them."""
        return self.tensors if self.released_eps is None else from_released(self.tensors, self.released_eps)


def initialise(config: TrainingRun, network: nn.Module, classes: Sequence[str]) -> Loaded:
    """Load the weights of `config.init` by name and shape. The body must match, and the head if the file has one.

    Weights mean the same in standard, checkpointed and in-place norms; those of released norms are converted. The
    classifier is loaded if it has the same `classes` in the same order; otherwise it stays random. If the file does not
    name its classes, only their number is compared, and the report says so. Averaged weights are preferred.

    ValueError: the file cannot be read, has another format, or does not fit; the network is unchanged.
    """
    init, is_released = config.init, isinstance(config.norm, ReleasedNorm)
    assert init.weights is not None
    path = checkpoint.file_of(init.weights)
    name = f"init.weights={path}"
    if init.format is None:
        weights = of_checkpoint(checkpoint.read(path), path, name)
    elif init.format == "released":
        weights = _of_release(path, name, init.scale)
    else:
        weights = _of_state_dict(path, name, init.format, network)
    if is_released and weights.released_eps is None:
        raise ValueError(
            f"{name} with norm=package: the released package cannot represent scales below its eps, so it cannot load "
            f"other norms; give norm=inplace"
        )
    tensors = weights.tensors if is_released else weights.converted()

    def skip(tensor_name: str, tensor: Tensor) -> str | None:
        if init.part == "body" and not is_of_body(tensor_name):
            return "init.part=body"
        return _other_classes(weights.classes, list(classes)) if is_of_classifier(tensor_name) else None

    options = _other_body(tensors, network)
    advice = (
        f"Give the body{f' ({options})' if options else ''}, head and norm.learn_scale that it was trained with, or "
        f"init.part=body if only the head differs"
    )
    report = load_by_name(
        network, tensors, source=weights.source, name=name, advice=advice, skip=skip, remarks=weights.remarks
    )
    if weights.classes is None and any(map(is_of_classifier, report.matched)):
        remark = "the file does not name its classes: only their number was compared"
        return report._replace(remarks=(*report.remarks, remark))
    return report


def _other_body(tensors: Mapping[str, Tensor], network: nn.Module) -> str:
    """The options with which the network would have the body of a file; "" if they are not known."""
    wrong = differences(tensors, network.state_dict())
    if "name" not in wrong:
        return " ".join(f"body.{option}={value}".replace(", ", ",") for option, value in wrong.items())
    of_kind = [
        name for name in choices("body", TrainingRun) if ("body", wrong["name"]) in alternatives_of("body", name)
    ]
    return " or ".join(f"body={name}" for name in of_kind)


def of_checkpoint(content: object, path: Path, name: str) -> Weights:
    """The weights in the content of a checkpoint of this project, averaged if it has such; `name` is for messages."""
    if not is_ours(content):
        raise ValueError(
            f"{name} is not a checkpoint of this project: give init.format=standard_bn if it is a state dict with "
            f"standard batch normalisation under our names, init.format=released for a file of the in-place ABN "
            f"release, init.format=torchvision for a ResNet of torchvision"
        )
    state = checkpoint.checked(content, path)
    norm = group_from_plain(state["config"], "norm", NORMS, name)
    averaged = "ema" in state
    return Weights(
        state["ema" if averaged else "network"],
        f"{path}, step {state['step']}{', averaged weights (EMA)' if averaged else ''}",
        None if "unnamed_classes" in state else list(state["classes"]),
        norm.eps if isinstance(norm, ReleasedNorm) else None,
        norm=norm,
    )


def _of_release(path: Path, name: str, scale: str | None) -> Weights:
    content = released.read(path, name)
    _check_foreign(content, name)
    file = released.weights_in(content, path, name, scale, key="init.scale")
    return Weights(file.tensors, f"{path} (released)", released_eps=file.eps, remarks=file.remarks)


def _of_state_dict(path: Path, name: str, format: str, network: nn.Module) -> Weights:
    content = torch_files.read(path, name, "a state dict {name: tensor}", "it may have to be copied again")
    _check_foreign(content, name)
    tensors = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(tensors, dict) or not all(
        isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()
    ):
        raise ValueError(
            f"{name} with init.format={format}: expected a state dict {{name: tensor}}, possibly below the key "
            f"state_dict"
        )
    if all(parameter.startswith("module.") for parameter in tensors):  # of DataParallel
        tensors = {parameter.removeprefix("module."): tensor for parameter, tensor in tensors.items()}
    remarks = torch_files.unchecked(path, name)
    if format == "standard_bn":
        return Weights(tensors, f"{path} (standard_bn)", remarks=remarks)
    assert format == "torchvision", format
    try:
        tensors = from_torchvision(tensors)
    except ValueError as error:
        raise ValueError(f"{name} with init.format=torchvision: {error}") from error
    activations = {module.activation for module in network.modules() if isinstance(module, ABN)}
    remarks += tuple(
        f"norm.activation={activation}: torchvision trained with relu, so this is only a starting point; "
        f"norm=std norm.activation=relu computes the same"
        for activation in sorted(activations - {"identity", "relu"})
    )
    return Weights(tensors, f"{path} (torchvision)", remarks=remarks)


def _check_foreign(content: object, name: str) -> None:
    if is_ours(content):
        raise ValueError(f"{name} is a checkpoint of this project: leave init.format out")


def is_ours(content: object) -> bool:
    """Whether the content of a file claims to be a checkpoint of this project."""
    return isinstance(content, dict) and "format" in content


def _other_classes(trained: list[str] | None, classes: list[str]) -> str | None:
    if trained is None or trained == classes:
        return None
    if len(trained) != len(classes):
        return f"for {len(trained)} classes: expected {len(classes)}"
    there, here = next(pair for pair in zip(trained, classes, strict=True) if pair[0] != pair[1])
    return f"for other classes, such as {there} in place of {here}"
