"""Start a run from the weights in a file, `init.weights`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from datasets.class_names import check_order
from datasets.reading import pairs_of
from engine.checkpoint import files as checkpoint
from engine.checkpoint import recorded
from engine.configuration.choices import alternatives_of, content_of
from engine.process.console import logger
from engine.schema.evaluation import NETWORK
from engine.schema.keys import CONFIGS
from engine.schema.network import Body, Norm, ReleasedNorm, TorchvisionBody
from engine.schema.training import Init, TrainingRun
from keepless import from_released
from models.bodies import LibraryBody
from models.checkpoints import released, torch_files
from models.checkpoints.loading import Loaded, is_of_body, is_of_classifier, load_by_name, state_dict_in, unwrapped
from models.checkpoints.published import (
    IMAGENET,
    PUBLISHED,
    Normalisation,
    downloaded_file,
    stated_normalisation,
    timm_tags,
)
from models.checkpoints.torchvision_names import PARTS, from_library, from_torchvision, resnet_depth


class Weights(NamedTuple):
    """The weights in a file."""

    tensors: Mapping[str, Tensor]
    source: str
    classes: list[str] | None = None  # None: the file does not name them
    released_eps: float | None = None  # of released norms, whose scale is |weight| + eps
    remarks: tuple[str, ...] = ()  # for the report
    norm: Norm | None = None  # of the network; None: the file does not say
    activation: str | None = None  # of the norms in training; None: unknown, or stated in the remarks
    normalisation: Normalisation | None = None  # of the images in training; None: unknown
    range16: Sequence[int] | None = None  # of 16-bit images in training; None: unknown
    body: str = "the body"  # the choice, such as body=resnext_tiny, if the file says so

    def converted(self) -> Mapping[str, Tensor]:
        """The tensors, with scales in the form that our norms use."""
        return self.tensors if self.released_eps is None else from_released(self.tensors, self.released_eps)

    def difference_of_classes(self, classes: Sequence[str]) -> str | None:
        """How the classes differ from the file's. None if they are equal, or if the file names no classes."""
        for trained_name, name in zip(self.classes or (), classes, strict=False):
            if trained_name != name:
                return f"for other classes, such as {trained_name} in place of {name}"
        return None

    def differences(self, config: TrainingRun) -> Iterator[str]:
        """Sentences on how a run's activation and normalisation differ from those the weights were trained with."""
        if self.activation not in (None, config.norm.activation):
            yield (
                f"norm.activation={config.norm.activation}: the weights were trained with {self.activation}, so this "
                f"is only a starting point; norm=std norm.activation={self.activation} computes the same"
            )
        if self.normalisation is not None and len(self.normalisation.mean) != config.data.channels:
            return  # the report says that weights are spread
        range16 = config.data.range16
        channels = config.data.channels
        if self.range16 is not None and pairs_of(self.range16, channels) != pairs_of(range16, channels):
            yield f"trained on images with data.range16={self.range16}; this run has data.range16={range16}"
        if self.normalisation not in (None, config.data.normalisation()):
            mean, std = map(list, self.normalisation)
            yield (
                f"trained on images with data.mean={mean} data.std={std}; this run has data.mean={config.data.mean} "
                f"data.std={config.data.std}"
            )


def check_exists(init: Init) -> None:
    """ValueError if the file `init.weights` is missing. A run asks before it checks its data, which takes long."""
    if init.weights in (None, PUBLISHED):
        return
    path = checkpoint.file_of(init.weights)
    if not path.is_file():
        problem = "is a folder without checkpoints/last.pt" if path.is_dir() else "does not exist"
        files = sorted((*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.pth")))  # of Hugging Face
        example = f", such as {files[0]}" if files else ""
        raise ValueError(
            f"init.weights={path} {problem}: expected a file of weights{example}, or the run_dir of another run"
        )


def initialise(config: TrainingRun, network: nn.Module, classes: Sequence[str]) -> Loaded:
    """Load the weights of `config.init` by name and shape. The body must match, and the head if the file has one.

    Weights mean the same in standard, checkpointed and in-place norms; released norms are converted. The
    classifier is loaded if it has the same `classes` in the same order; otherwise it stays random. If the file does not
    name its classes, only their number is compared, and the report says so. Averaged weights are preferred.

    ValueError: the file cannot be read, has another format, does not fit, or does not name classes whose order is in
    doubt; the network is unchanged.
    """
    init = config.init
    is_released = isinstance(config.norm, ReleasedNorm)
    path = _file_of_weights(config)
    name = f"init.weights={path}"
    weights = _weights_in_file(path, name, network, config)
    if is_released and weights.released_eps is None:
        raise ValueError(
            f"{name} with norm=package: the released package cannot represent scales below its eps, so it cannot load "
            f"other norms; give norm=inplace"
        )

    def skip(tensor_name: str, _: Tensor) -> str | None:
        if init.part == "body" and not is_of_body(tensor_name):
            return "init.part=body"
        if not is_of_classifier(tensor_name):
            return None
        if weights.classes is None:
            check_order(classes, name, config.data.order_key)
        return weights.difference_of_classes(classes)

    trained_channels = len((weights.normalisation or IMAGENET).mean)
    has_others = trained_channels not in (len(IMAGENET.mean), config.data.channels)  # three are spread
    choice = f"{weights.body}, data.channels={trained_channels}," if has_others else weights.body
    advice = f"Give {choice} and the norm.learn_scale that it was trained with"
    advice_on_head = ", and its head; or init.part=body for its body alone" if init.part == "network" else ""
    report = load_by_name(
        network,
        weights.tensors if is_released else weights.converted(),
        source=weights.source,
        name=name,
        advice=advice,
        advice_on_head=advice_on_head,
        skip=skip,
        remarks=(*weights.remarks, *weights.differences(config)),
        channels=config.data.channels,
    )
    if weights.classes is None and any(map(is_of_classifier, report.matched)):
        remark = "the file does not name its classes: only their number was compared"
        return report._replace(remarks=(*report.remarks, remark))
    return report


def _file_of_weights(config: TrainingRun) -> Path:
    """The file that `init.weights` means, downloaded if it is a published one."""
    assert config.init.weights is not None
    if config.init.weights != PUBLISHED:
        return checkpoint.file_of(config.init.weights)
    assert isinstance(config.body, TorchvisionBody), "TrainingRun.check requires it"
    return downloaded_file(config.body.name, config.body.network)


def _weights_in_file(path: Path, name: str, network: nn.Module, config: TrainingRun) -> Weights:
    """The weights in a file of `init.format`. ValueError, naming it `name`: it cannot be read, or is of another."""
    init = config.init
    if init.format is None:
        return weights_in_checkpoint(checkpoint.read(path), path, name)
    is_released = init.format == "released"
    if is_released:
        content = released.read(path, name)
    else:
        content = torch_files.read(path, name, "a state dict {name: tensor}", "it may have to be copied again")
    if is_ours(content):
        raise ValueError(f"{name} is a checkpoint of this project: leave init.format out")
    if is_released:
        file = released.weights_in(content, path, name, init.scale, key="init.scale")
        return Weights(file.tensors, f"{path} (released)", released_eps=file.eps, remarks=file.remarks)
    return _weights_in_state_dict(content, path, name, network, config)


def normalisation_of(init: Init, channels: int) -> Normalisation | None:
    """The normalisation of the checkpoint `init.weights`, if it is ours and its images have as many channels.

    ValueError: the file cannot be read.
    """
    if init.weights in (None, PUBLISHED) or init.format is not None:
        return None
    path = checkpoint.file_of(init.weights)
    content = checkpoint.read(path)
    if not is_ours(content):
        return None  # `initialise` says so
    data = recorded.of_checkpoint(checkpoint.checked(content, path), f"init.weights={path}", NETWORK).data
    return data.normalisation() if data.channels == channels else None


def weights_in_checkpoint(content: object, path: Path, name: str) -> Weights:
    """The weights in the content of our checkpoint, averaged ones if present; `name` is for messages."""
    if not is_ours(content):
        raise ValueError(
            f"{name} is not a checkpoint of this project: give init.format=standard_bn if it is a state dict with "
            f"standard batch normalisation under our names, init.format=released for a file of the in-place ABN "
            f"release, init.format=torchvision or timm for a file of these libraries"
        )
    state = checkpoint.checked(content, path)
    config = recorded.of_checkpoint(state, name, NETWORK)
    norm = config.norm
    is_averaged = "ema" in state
    return Weights(
        state["ema" if is_averaged else "network"],
        f"{path}, step {state['step']}{', EMA weights' if is_averaged else ''}",
        None if "unnamed_classes" in state else list(state["classes"]),
        norm.eps if isinstance(norm, ReleasedNorm) else None,
        norm=norm,
        activation=norm.activation,
        normalisation=config.data.normalisation(),
        range16=config.data.range16,
        body=_choice_text(config.body),
    )


def _choice_text(body: Body) -> str:
    """The choice of a body, such as body=resnet50; its kind if keys were changed, and no file in configs/ has them."""
    if isinstance(body, TorchvisionBody):
        return f"body={body.name} body.network={body.network}"
    unchanged = {field.name: getattr(body, field.name) for field in fields(Body)}
    for file in sorted((CONFIGS / "body").glob("*.yaml")):
        values = {key: value for key, value in content_of(file).items() if key != "defaults"}
        is_of_kind = ("body", body.name) in alternatives_of("body", file.stem)
        if is_of_kind and type(body)(**values | unchanged) == body:
            return f"body={file.stem}"
    return f"the body (a {body.name})"


def _weights_in_state_dict(content: object, path: Path, name: str, network: nn.Module, config: TrainingRun) -> Weights:
    """The weights in the content of another library's file."""
    format = config.init.format
    tensors, averaged = state_dict_in(content)
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in tensors.items()
    ):
        raise ValueError(
            f"{name} with init.format={format}: expected a state dict {{name: tensor}}, possibly below the key "
            f"state_dict or model"
        )
    body = getattr(network, "body", network)
    parts = {key.partition(".")[0] for module in (network, body) for key in module.state_dict()}
    parts |= {"body"} if format == "standard_bn" else {"body", *PARTS}
    tensors, remarks = unwrapped(tensors, parts)
    remarks = averaged + remarks
    if format == "standard_bn":
        return Weights(tensors, f"{path} (standard_bn)", remarks=remarks)
    source = f"{path} ({format})"
    if isinstance(body, LibraryBody):
        tensors, name_remarks = from_library(tensors, body.state_dict(), body.left_out)
        normalisation = stated_normalisation(path, content) if format == "timm" else None
        if normalisation is None and format == "timm" and config.init.weights != PUBLISHED:
            normalisation = _normalisation_of_tags(name, config)
        return Weights(
            tensors,
            source,
            remarks=remarks + name_remarks + body.remarks,
            normalisation=normalisation or config.body.normalisation(),
        )
    choice = f"resnet{resnet_depth(tensors)}"
    has_choice = (CONFIGS / "body" / f"{choice}.yaml").is_file()
    try:
        tensors = from_torchvision(tensors)
        weights = Weights(tensors, source, remarks=remarks, activation="relu", normalisation=IMAGENET)
        return weights._replace(body=f"body={choice}") if has_choice else weights
    except ValueError as error:
        advice = "body=torchvision or body=timm takes others"
        raise ValueError(f"{name} with init.format={format}: {error}; {advice}") from error


def _normalisation_of_tags(name: str, config: TrainingRun) -> Normalisation | None:
    """The run's normalisation if a tag of the network has it; a warning if it is the default and others differ."""
    body = config.body
    normalisation = config.data.normalisation()
    assert isinstance(body, TorchvisionBody), body
    tags_by_normalisation = timm_tags(body.network)
    if len(tags_by_normalisation) > 1 and normalisation == body.normalisation():
        differences = (
            f"{', '.join(tags)}: mean={[*candidate.mean]} std={[*candidate.std]}"
            for candidate, tags in tags_by_normalisation.items()
        )
        logger.warning(
            f"{name} does not say which weights of timm it holds, whose images were normalised differently "
            f"({'; '.join(differences)}), and this run takes data.mean={[*normalisation.mean]} "
            f"data.std={[*normalisation.std]}: give body.network with the tag of the file, such as "
            f"{body.network}.{tags_by_normalisation[normalisation][0]}"
        )
    return normalisation if normalisation in tags_by_normalisation else None


def is_ours(content: object) -> bool:
    """Whether the content of a file claims to be a checkpoint of this project."""
    return isinstance(content, dict) and "format" in content
