"""Write a trained network as a file that needs nothing from this repository:

    python -m scripts.export checkpoint=RUN_DIR output=FILE.pt2
    python -m scripts.export checkpoint=FILE.pt output=FILE.onnx format=onnx argmax=true
    python -m scripts.export checkpoint=FILE.pt output=FILE.pt2 precision=float16

The program (exported, onnx) takes float32 RGB images (N, 3, H, W) in [0, 255], any N, H and W (with
data.channels=C images (N, C, H, W)), and returns float32 logits (N, classes, H, W), or (N, classes) for a
classifier. Normalisation is included. The program does not check its images: multiply images of 0 to 1, as
torchvision's ToTensor makes them, by 255. Before it is written, it is compared with the network at other sizes
than its example.
Classes, colours and how an evaluation resizes and crops images (data.base_size, crops) are in the file as JSON:

    extra = {"network.json": ""}
    network = torch.export.load("FILE.pt2", extra_files=extra).module()

An ONNX model has them in its metadata, under "network". For weights alone: scripts.convert_checkpoint.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor
from torch.export import ExportedProgram

from datasets import IGNORED
from datasets.stored import COLOURS
from engine.assemble.contracts import parts_named
from engine.checkpoint import files as checkpoint
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.prediction.opening import Opened, open_checkpoint
from engine.prediction.predictors import Segmenter
from engine.prediction.programs import largest_difference, program_of
from engine.process.console import make_console
from engine.process.output_files import writable_file, write_file
from engine.records.provenance import provenance
from engine.schema.additions import Plugins
from engine.schema.evaluation import Prediction
from engine.schema.keys import key

METADATA = "network.json"  # an extra file of the program
SIZES = ("base_size", "antialias", "resize", "crop_size")
_INSTALL = "pip install onnx onnxscript onnxruntime"  # keepless is not on PyPI, so its extra is not either
LARGEST = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}  # differences of logits, as shares of the largest


@dataclass
class Export(Plugins):
    checkpoint: str = MISSING  # file, or a run directory, whose last checkpoint is used
    output: str = key(MISSING, written=True)  # the file to write, such as n.pt2 or n.onnx
    format: str = key("exported", one_of=("exported", "onnx"))
    averaged: bool = True  # the EMA weights, if the checkpoint has them
    # Return the position of each pixel's class, int64 (N, H, W), or of each image's, (N,), instead of logits.
    argmax: bool = False
    precision: str = key("float32", one_of=tuple(LARGEST))  # of the program's weights and features, but not its norms
    # Height and width of all images, for a network that can only be exported for one size; null: any.
    size: list[int] | None = key(None, above=0, entries=("height", "width in pixels"))

    def check(self) -> None:
        if self.format == "onnx" and self.precision == "bfloat16":
            raise ValueError("precision=bfloat16 with format=onnx: onnxruntime has no such convolutions; give float16")
        if not self.output.endswith({"onnx": ".onnx"}.get(self.format, ".pt2")):
            raise ValueError(
                f"output={self.output} with format={self.format}: give output=….pt2, a program of torch.export, or "
                f"format=onnx output=….onnx; no other format is written"
            )


def export(options: Export) -> dict:
    """Export as configured (`Export`); return the metadata. ValueError: the network cannot be exported this way."""
    output = Path(options.output)
    source = checkpoint.file_of(options.checkpoint)
    opened = open_checkpoint(source, Prediction(averaged=options.averaged, device="cpu", precision="float32"))
    description = metadata(opened, options)
    writable_file("output", output, source, kind="program")
    with parts_named(opened.config):
        program = program_of(opened.network, options.size, getattr(torch, options.precision), options.argmax)
    if options.format == "onnx":
        content = onnx_model(program, description, options.size)
        loaded = onnx_runner(content)
    else:
        content = exported_program(program, description)
        loaded = torch.export.load(BytesIO(content)).module()
    try:
        difference = largest_difference(loaded, opened.network, options.size)
    except RuntimeError as error:  # a pooling window depends on the size; reversible bodies keep float32
        raise ValueError(
            f"checkpoint={source}: the program fails at other sizes than it was made with, or in "
            f"precision={options.precision} ({error}): give size=[HEIGHT,WIDTH], or precision=float32"
        ) from error
    if not difference < LARGEST[options.precision]:
        raise ValueError(
            f"checkpoint={source}: at other sizes than it was made with, the program's output differs by "
            f"{difference:.1e}; expected less than {LARGEST[options.precision]}: give size=[HEIGHT,WIDTH]"
        )
    write_file(output, content)
    make_console().print(f"wrote the network of step {opened.state['step']} to {output}", soft_wrap=True)
    return json.loads(description)


def metadata(opened: Opened, options: Export) -> str:
    """What a user of the file needs to know, as JSON."""
    network, config, state = opened
    colours = "RGB" if network.channels == COLOURS else None
    shape = ["N", network.channels, *(options.size or "HW")]
    plain = configuration.plain(config)
    origin = provenance()
    facts = {
        "task": config.task,
        "classes": network.classes,
        "palette": state.get("palette"),  # RGB of each class
        "label_ids": network.label_ids.tolist() if isinstance(network, Segmenter) else None,  # of each class, in labels
        "ignore_index": IGNORED if isinstance(network, Segmenter) else None,  # of the labels in training
        "output": "classes" if options.argmax else "logits",
        "precision": options.precision,
        "input": {"dtype": "float32", "shape": shape, "colours": colours, "levels": [0, 255]},
        "range16": config.data.range16,  # the values of 16-bit images that became levels 0 and 255
        # Included: (image - mean) / std. Without mean: the mean image of the training images.
        "normalisation": {"mean": channel_values(network.mean), "std": channel_values(network.std)},
        # How an evaluation resizes and crops images first.
        "sizes": {name: getattr(config.data, name) for name in SIZES if hasattr(config.data, name)},
        "network": {part: plain[part] for part in ("body", "head", "norm") if part in plain},
        "step": state["step"],
        "commit": origin["commit"],
        "versions": origin["versions"],
    }
    return json.dumps(facts, indent=1, ensure_ascii=False)


def channel_values(statistic: Tensor) -> list[float] | None:
    """The values of the channels, (1, C, 1, 1); None if there is one for each pixel."""
    return statistic.flatten().tolist() if statistic[0, 0].numel() == 1 else None


def exported_program(program: ExportedProgram, description: str) -> bytes:
    """The file of `torch.export.save`."""
    content = BytesIO()
    torch.export.save(program, content, extra_files={METADATA: description})
    return content.getvalue()


def onnx_model(program: ExportedProgram, description: str, size: Sequence[int] | None) -> bytes:
    """The ONNX file of a program, for images of one `size` or any. ValueError: PyTorch's exporter lacks a package."""
    try:
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=["output"],
            dynamic_shapes=({0: "batch"} if size is not None else {0: "batch", 2: "height", 3: "width"},),
            verbose=False,
        )
    except ImportError as error:  # torch.onnx's own error derives from it
        raise ValueError(f"format=onnx needs packages ({error}): {_INSTALL}") from error
    assert onnx_program is not None
    _mend_weights(onnx_program.model)
    onnx_program.model.metadata_props["network"] = description
    return onnx_program.model_proto.SerializeToString()


def _mend_weights(model: Any) -> None:
    """Mend float16 convolutions into which onnxscript 0.7 has folded float32 norms: their weights are float32 then."""
    import onnx_ir  # type: ignore[import-not-found]  # comes with onnxscript

    for node in model.graph:
        image, *weights = node.inputs if node.op_type == "Conv" else [None]
        for weight in filter(None, weights):
            if image and image.dtype and weight.const_value is not None and weight.dtype != image.dtype:
                values = weight.const_value.numpy().astype(image.dtype.numpy())
                weight.const_value = onnx_ir.tensor(values, name=weight.name)
                weight.dtype = image.dtype


def onnx_runner(content: bytes) -> Callable[[Tensor], Tensor]:
    """A function that runs an ONNX model with onnxruntime. ValueError: it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"format=onnx is checked with onnxruntime ({error}): {_INSTALL}") from error
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


main = configured("export", Export)(export)

if __name__ == "__main__":
    main()
