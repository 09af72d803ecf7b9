"""Convert a released checkpoint to one of this project, or keep only the weights of a checkpoint:

    python -m scripts.convert_checkpoint input=FILE output=FILE [scale=released|raw]
    python -m scripts.convert_checkpoint input=FILE output=FILE [classes=FILE | data.root=DIR]
    python -m scripts.convert_checkpoint input=FILE output=FILE format=standard_bn
    python -m scripts.convert_checkpoint input=RUN_DIR output=FILE

The first two make a checkpoint that eval.py, scripts.predict and init.weights read like any other. The network is
recognised from the file. A file states neither its scale, which is known only for the authors' files, nor its classes.
Without classes or data.root, classes are called 0, 1, 2, …, and an evaluation compares only their number. Otherwise it
compares names: for ImageNet the names of the class folders (n01440764, …) in sorted order. The third command writes the
weights of either kind of input as a state dict for networks with standard batch normalisation and the same names. It
lacks the norms' eps and activation, so the command prints them. The last makes a checkpoint to share: the (EMA)
weights, classes and configuration of a run, without its optimiser, random states and folders. An output that is called
NAME.safetensors is a file of safetensors, which our commands read like the others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from datasets.class_names import ORDERS, check_names, check_order
from datasets.class_table import distinct_colours
from datasets.layout import read_list
from datasets.vistas import vistas_classes
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import initial_weights, recorded
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.prediction.authors_networks import of_released
from engine.process.console import make_console
from engine.process.output_files import writable_file
from engine.schema.additions import Plugins
from engine.schema.classification import ClassFoldersData, ClassificationRun
from engine.schema.evaluation import NETWORK
from engine.schema.keys import key
from engine.schema.network import BatchNorm
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import Init
from models.checkpoints import released
from models.checkpoints.loading import listed
from models.checkpoints.torch_files import SAFETENSORS, safetensors_for

NAMES = "eval.py compares the names with the data: for ImageNet the class folders (n01440764, …) in sorted order"
Colours = list[tuple[int, int, int]]


@dataclass
class ConversionData:
    root: str | None = None  # folder of ImageNet or Vistas, whose classes the network has
    class_order: str | None = key(None, one_of=ORDERS)  # how ImageNet's class folders are sorted, see train_imagenet.py


@dataclass
class Conversion(Plugins):
    input: str = MISSING  # the file to convert, or a run directory
    output: str = key(MISSING, written=True)  # the file to write; NAME.safetensors becomes a file of safetensors
    format: str = key("checkpoint", one_of=("checkpoint", "standard_bn"))  # of the output
    # Whether the norms of a released file scale by |weight| + eps (released) or by weight (raw).
    scale: str | None = key(None, one_of=released.SCALES)
    classes: str | None = None  # file with the classes' names, one per line; for Vistas also its config_v1.2.json
    data: ConversionData = field(default_factory=ConversionData)

    def check(self) -> None:
        if self.output.endswith((".onnx", ".pt2")):
            raise ValueError(f"output={self.output}: scripts.export writes programs; expected NAME.pt or .safetensors")
        if self.classes is not None and self.data.root is not None:
            raise ValueError(f"classes={self.classes} and data.root={self.data.root}: give one of them")
        if self.format != "checkpoint" and (self.classes is not None or self.data.root is not None):
            raise ValueError(f"format={self.format} with classes or data.root: only a checkpoint holds class names")


def convert(options: Conversion) -> list[str]:
    """Convert as configured (`Conversion`); return the printed lines. ValueError if the input does not allow it."""
    source = checkpoint.file_of(options.input)
    output = Path(options.output)
    name = f"input={source}"
    if output.suffix == SAFETENSORS:
        safetensors_for(f"output={output}")
    content = released.read(source, name, checkpoint.advice_if_damaged(source))
    is_ours = initial_weights.is_ours(content)
    for key_name, value in (("scale", options.scale), ("classes", options.classes), ("data.root", options.data.root)):
        if is_ours and value is not None:
            raise ValueError(f"{key_name}={value} has no effect on {name}, a checkpoint of ours: leave it out")
    writable_file("output", output, source, kind="network")
    if options.format == "standard_bn":
        lines = _write_standard_bn(content, source, output, options.scale)
    elif is_ours:
        lines = _write_weights_alone(checkpoint.checked(content, source), source, output)
    else:
        lines = _write_checkpoint(options, released.weights_in(content, source, name, options.scale), source, output)
    lines.append(f"output {output}")
    make_console().print("\n".join(lines), soft_wrap=True)
    return lines


def _write_standard_bn(content: Any, source: Path, output: Path, scale: str | None) -> list[str]:
    """Write the weights as a state dict for standard norms. Returns lines with the eps and activation it lacks."""
    name = f"input={source}"
    remark = ""
    if initial_weights.is_ours(content):
        ours = initial_weights.weights_in_checkpoint(content, source, name)
        if not isinstance(ours.norm, BatchNorm):
            raise ValueError(f"{name} has norm={ours.norm and ours.norm.name}: expected a batch normalisation")
        norm = ours.norm
        tensors = ours.converted()
        lines = [f"input {ours.source}"]
        network = content["config"]["body"].get("network") if isinstance(content, dict) else None
        if network:
            remark = f" (in the body {network}'s own eps, and this for its ReLUs alone)"
    else:
        file = released.weights_in(content, source, name, scale)
        norm = BatchNorm(activation="leaky_relu")  # its eps and activation are the release's
        tensors = file.converted()
        lines = [f"input {source}", *file.remarks]
    checkpoint.write_alone(output, released.to_standard_bn(tensors))
    slope = f" ({norm.activation_param})" if norm.activation in ("leaky_relu", "elu") else ""
    return [*lines, f"its norms need eps={norm.eps} and {norm.activation}{slope}{remark}, which the file does not hold"]


def _write_weights_alone(state: dict, source: Path, output: Path) -> list[str]:
    """Write the parts of our checkpoint that an evaluation needs. Returns lines that describe the file."""
    config = recorded.of_checkpoint(state, f"input={source}", NETWORK)
    config.run_dir = None
    config.resume = None
    config.data.root = None
    config.init = Init()
    if isinstance(config, SegmentationRun):
        config.sampler.folder = None
    parts = {name: state[name] for name in (*checkpoint.NEEDED, *checkpoint.OPTIONAL) if name in state}
    parts |= {"config": configuration.plain(config), "network": state.get("ema", state["network"])}
    checkpoint.write_alone(output, {"format": checkpoint.FORMAT, **parts})
    ema = "EMA " if "ema" in state else ""
    return [f"input {source}", f"the {ema}weights of step {state['step']}, for evaluations and init.weights"]


def _write_checkpoint(options: Conversion, file: released.ReleasedWeights, source: Path, output: Path) -> list[str]:
    """Write an ordinary checkpoint of step 0. Returns lines that describe it."""
    config, state, architecture = of_released(file, f"input={source}")
    segments = isinstance(config, SegmentationRun)
    is_named = options.classes is not None or options.data.root is not None
    config.data.root = options.data.root
    if isinstance(config.data, ClassFoldersData):
        config.data.class_order = options.data.class_order
    if is_named:
        del state["unnamed_classes"]
        names, colours, ids = _classes(options, config, len(state["classes"]))
        state |= {"classes": names} | ({"palette": colours, "label_ids": ids} if segments else {})
    checkpoint.write_alone(output, {"format": checkpoint.FORMAT, **state, "config": configuration.plain(config)})
    names = state["classes"]
    description = f"{names[0]}, …" if is_named else "numbered, as the file does not name them"
    lines = [f"input {source}", *file.remarks]
    lines += [f"{config.task} with norm={config.norm.name}, {architecture}", f"{len(names)} classes: {description}"]
    if options.classes is not None and not segments:
        lines.append(NAMES)
    if architecture.kind == "wider_resnet" and not segments:
        lines.append("WideResNet-38 was assumed: its A2 variant has the same tensors, but computes another function")
    return lines


def _classes(
    options: Conversion, config: SegmentationRun | ClassificationRun, count: int
) -> tuple[list[str], Colours, list[int]]:
    """Names, colours and label ids of the classes; the last two mean nothing in classification.

    ValueError: they are not as many as `count`, the classifier's, or cannot be read.
    """
    names: Sequence[str]
    colours: Sequence[tuple[int, int, int]] = distinct_colours(count)
    ids: Sequence[int] = range(count)
    argument = f"data.root={options.data.root}" if options.classes is None else f"classes={options.classes}"
    if options.classes is not None and Path(options.classes).suffix == ".json":
        table = vistas_classes(Path(options.classes))
        names, colours, ids = table.names, table.palette, table.official_ids
    elif options.classes is not None:
        names = _names_in(Path(options.classes), argument)
    elif isinstance(config, SegmentationRun):
        dataset = assemble.dataset(config.data, config.data.val_split, key="data.val_split")
        names, colours, ids = dataset.classes, dataset.palette, dataset.label_ids
    else:
        names = assemble.classified_split(config.data, config.data.val_split, "data.val_split").classes
        check_order(names, f"input={options.input}", config.data.order_key)
    if len(names) != count:
        raise ValueError(f"{argument} has {len(names)} classes: expected {count}, as the classifier of the file")
    return list(names), list(colours), list(ids)


def _names_in(file: Path, argument: str) -> list[str]:
    """The names of classes in a text file, one a line. ValueError, which names `argument`: two are equal, or unfit."""
    names = [line.strip() for line in read_list(file, "one class")]
    check_names(enumerate(names), f"{argument}: ")
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"{argument} has {listed(repeated)} more than once: expected different names; {NAMES}")
    return names


main = configured("convert_checkpoint", Conversion)(convert)

if __name__ == "__main__":
    main()
