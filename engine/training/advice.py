"""What a training's log and errors advise: the command that evaluates, smaller settings, other weights."""

import shlex
from pathlib import Path

import torch

from engine.records.metrics_logger import MetricsLogger
from engine.schema.keys import override
from engine.schema.training import TrainingRun

BFLOAT16 = (  # for the log: docs/results/steps.md
    "this device computes bfloat16: trainer.precision=bfloat16 takes about half of the memory, and a step of Table 3's "
    "ResNeXt-101 on an H100 79 ms instead of 97, with trainer.capture 39 instead of 69"
)


def evaluation_command(config: TrainingRun, checkpoint: Path) -> str:
    """The command that evaluates a checkpoint, from the folder that this process was started in."""
    entry = Path(__file__).resolve().parents[2] / "eval.py"
    words = ["python", entry.name if entry.parent == Path.cwd() else str(entry)]
    if config.plugins:
        words.append(f"plugins=[{','.join(config.plugins)}]")
    return shlex.join([*words, override("checkpoint", checkpoint)])


def why_ended_early(config: TrainingRun, metrics: MetricsLogger) -> str:
    """Why a run ended before its last step."""
    best = "no number"
    if metrics.best:
        step, score = metrics.best
        best = f"step {step:,}'s {config.score_text(score)}"
    patience = config.trainer.patience
    return f"{metrics.evaluations_since_best} evaluations were not better than {best} (trainer.patience={patience})"


def gains_by_bfloat16(config: TrainingRun, device: torch.device) -> bool:
    """Whether a float32 training is on a device that computes bfloat16, and could use it."""
    is_float32 = config.trainer.precision == "float32" and not config.norm.only_float32
    return is_float32 and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def on_memory(config: TrainingRun, process_count: int, is_captured: bool = False) -> str:
    """Changes that each roughly halve a training step's memory, and are not made already."""
    trainer = config.trainer
    norm = config.norm
    ways = []
    at_a_time = config.data.crops_per_minibatch // (process_count * trainer.accumulation_steps)
    if at_a_time >= 2 * config.fewest_on_each(process_count):
        ways.append("twice the trainer.accumulation_steps or processes")
    if trainer.recompute in ("none", "activations") and not config.body.is_reversible():
        ways.append("trainer.recompute=blocks")
    if trainer.precision == "float32" and not norm.only_float32:
        ways.append("trainer.precision=bfloat16")
    if norm.name == "std" and norm.activation != "relu" and trainer.recompute == "none":
        ways.append("norm=inplace")
    ways.append(f"data.crop_size={int(config.data.crop_size / 2**0.5)}")
    text = f"({config.division(process_count)}). Each of these roughly halves the memory for crops: {', '.join(ways)}"
    if not config.memory.fit:
        text += ". memory.budget=… memory.fit=batch chooses a minibatch that fits"
    if is_captured:
        text += "; trainer.capture=false saves what a CUDA graph adds, 4 to 14 %"
    return text


def on_scale(config: TrainingRun, variance: float) -> str:
    """A warning that initial weights see `variance` times the variance that they were trained on."""
    return (
        f"init.weights={config.init.weights}: in training images the first norm sees {variance:.1e} times the "
        f"variance that it was trained on, so the weights seem to expect another scale: check data.mean and "
        f"data.std (networks from Caffe take levels of 0 to 255: data.std=[0.00392,0.00392,0.00392]; most of them "
        f"also take BGR: reverse the input channels of the first convolution in the file)"
    )
