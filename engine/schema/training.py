"""Keys of training runs of any task, with their rules and the messages that name them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from datasets.stored import COLOURS
from engine.schema.additions import Augmentation, Logger, Plugins, Score
from engine.schema.data import Data
from engine.schema.keys import MOST_SECONDS, group, key, several
from engine.schema.memory import Memory
from engine.schema.network import MOMENTUM, Body, Norm, TorchvisionBody
from engine.schema.optim import LRSchedule, Optim
from models.bodies.library import LIBRARY_ACTIVATIONS
from models.checkpoints.published import PUBLISHED
from models.checkpoints.released import SCALES
from models.recomputation import RECOMPUTE

DEVICES = ("auto", "cpu", "cuda")
LIBRARIES = ("torchvision", "timm")
OF_OTHERS = (  # for messages about a file that is not a checkpoint
    "if it is of the in-place ABN release, scripts.convert_checkpoint makes a checkpoint of it; a training starts from "
    "its weights with init.weights=FILE and init.format=standard_bn, released, torchvision or timm"
)
CAPTURE_ADVICE = "give trainer.capture=auto or false"
FEWEST_CAPTURED = 50  # steps of a run: a capture costs a few
PRECISIONS = ("float32", "bfloat16", "float16")


class Extent(NamedTuple):
    """What a training goes over, in numbers."""

    class_count: int
    image_count: int  # of the training split
    process_count: int
    step_count: int
    shared_count: int = 0  # validation images that are training images too, or copies of them
    official_class_count: int | None = None  # as published, if it is


@dataclass
class Trainer:
    # Length of the run; if steps are given too, the shorter counts. Fewer for more images: from a pretrained backbone
    # the paper's segmentations take 360 epochs of 3,000 images, 90 of 18,000, 30 of 40,000; random weights take longer.
    epochs: int | None = key(None, above=0)
    steps: int | None = key(None, above=0)  # length of the run, instead of epochs
    # Evaluate on the validation split this often; the end of the run is always evaluated.
    evaluate_every_epochs: int | None = key(None, above=0, free_on_resume=True)
    # The same in steps.
    evaluate_every_steps: int | None = key(None, above=0, free_on_resume=True)
    # Evaluate only N images, even at the end: the first, or in classification spread over the split; null: all.
    evaluate_images: int | None = key(None, above=0, free_on_resume=True)
    # End the run after so many evaluations in a row without a better score. A resumed run may have a larger number.
    patience: int | None = key(None, above=0, free_on_resume=True)
    checkpoint_every_steps: int = key(500, above=0, free_on_resume=True)  # write checkpoints/last.pt this often
    log_every_steps: int = key(20, above=0, free_on_resume=True)  # record loss and speed this often
    device: str = key("auto", one_of=DEVICES, per_machine=True)  # auto: CUDA if there is a device
    # bfloat16 and float16 use autocast; float16 also scales the loss. Choose bfloat16 on GPUs from Ampere on and CPUs
    # with instructions for it, float16 on earlier GPUs, float32 on other CPUs.
    precision: str = key("float32", one_of=PRECISIONS)
    tf32: bool = True  # on CUDA, convolutions and matrix products multiply float32 with 10-bit mantissas
    channels_last: bool = True  # memory format of activations; false: contiguous
    # activations: see `recompute_activations`; budget: recompute as many activations as memory.budget requires;
    # blocks, sqrt: checkpoint the body's blocks, i.e. keep each block's input, or every sqrt(L)-th of L inputs,
    # and recompute the rest in the backward pass. Start with activations if memory is short, then budget.
    recompute: str = key("none", one_of=(*RECOMPUTE, "budget"), free_on_resume=True)
    compile: bool = False  # in training, compile forward and backward pass by torch.compile, as one graph
    # On CUDA, from the fourth step on, run the forward pass, loss and backward pass of a micro-batch as one CUDA graph.
    # auto: where that can be done, in one process; the log says why not. true: it is an error where it cannot.
    capture: Any = key("auto", word="auto", free_on_resume=True)
    deterministic: bool = False  # deterministic algorithms only: repeated runs give equal weights
    accumulation_steps: int = key(1, above=0)  # micro-batches per minibatch in each process
    # Decay per step of the weights' exponential moving average, which is then evaluated; null: no average. 0.999 to
    # 0.9999 for runs of more than 10,000 steps; at most 1 - 10 / steps for shorter ones.
    ema_decay: float | None = key(None, above=0, most=1)
    smoke: bool = False  # only test whether it runs: eager norms, so that nothing compiles, and no long warm-up
    # Instead of a training, compare one of so many steps with one that is stopped and continued: debug=resume.
    resume_check: int = key(0, least=0)
    profile: int = key(0, least=0, free_on_resume=True)  # steps to profile, after ten warm-up steps, to RUN_DIR/profile
    # How long one process waits for another.
    timeout_seconds: int = key(1800, above=0, most=MOST_SECONDS, per_machine=True)


@dataclass
class Init:
    """The initial weights; random without a file."""

    # A checkpoint of this project, its run directory, or a file of init.format. published: with body=torchvision or
    # body=timm, the library's own weights, downloaded once.
    weights: str | None = None
    # For a file from elsewhere. standard_bn: a state dict with standard batch normalisation under our names (or below
    # the key "state_dict", and with "module." before each); released: a checkpoint of the in-place ABN release;
    # torchvision, timm: a library's file, for body=torchvision or timm, or for our ResNets, ResNeXt-50 and DenseNets.
    format: str | None = key(None, one_of=("standard_bn", "released", *LIBRARIES))
    # In a released file, norms scale by |weight| + eps (released) or by weight (raw). null: known by the file's md5.
    scale: str | None = key(None, one_of=SCALES)
    part: str = key("network", one_of=("network", "body"))  # body: head and classifier start from random weights

    def check(self) -> None:
        options = {"format": self.format, "scale": self.scale, "part": None if self.part == "network" else self.part}
        for name, value in options.items():
            if value is not None and self.weights is None:
                raise ValueError(f"init.{name}={value} needs init.weights=FILE, the weights to start from")
        if self.scale is not None and self.format != "released":
            raise ValueError(f"init.scale={self.scale} needs init.format=released, whose files do not say their scale")


@dataclass
class TrainingRun(Plugins):
    """One training run. Each task sets the class attributes."""

    task: ClassVar[str]  # its name in checkpoints
    entry: ClassVar[str]  # the command that trains it
    score: ClassVar[str]  # name of the score that selects best.pt; higher is better
    score_label: ClassVar[str]  # the score's name in messages
    second_score: ClassVar[str]  # names of other scores in results.json
    class_score: ClassVar[str]
    head_modules: ClassVar[tuple[str, ...]]  # modules of the network that are not its body, for optim.head_lr_factor
    fewest_at_a_time = (1, "every micro-batch needs an image")  # images that a micro-batch needs, and why
    evaluation_memory_advice: ClassVar[str] = ""  # for messages

    # null: runs/DATASET-NORM/OVERRIDES/DATE. With -m, the folder of all jobs' run directories.
    run_dir: str | None = key(None, free_on_resume=True)
    # auto: resume the run in run_dir if there is one, else start it
    resume: str | None = key(None, one_of=("auto",), free_on_resume=True)
    seed: int = key(0, least=0, most=2**63 - 1)  # of initial weights, sampling and augmentation
    init: Init = field(default_factory=Init)
    norm: Norm = group()
    body: Body = group()
    data: Data = group()
    optim: Optim = group()
    lr_schedule: LRSchedule = group()
    augmentations: dict[str, Augmentation] = several()  # changes of training crops, in this order: [NAME,NAME]
    scores: dict[str, Score] = several()  # further scores of evaluations: [NAME,NAME]
    logger: dict[str, Logger] = several(free_on_resume=True)  # further records of the run, such as W&B: [NAME]
    trainer: Trainer = field(default_factory=Trainer)
    memory: Memory = field(default_factory=Memory)

    def check(self) -> None:
        """ValueError, which names the key, its value and the fix: a rule between groups is broken."""
        trainer = self.trainer
        self._check_library_network()
        if trainer.epochs is None and trainer.steps is None:
            raise ValueError("trainer.epochs and trainer.steps are both null: give one of them, the length of the run")
        if trainer.patience is not None and not (trainer.evaluate_every_epochs or trainer.evaluate_every_steps):
            raise ValueError(
                f"trainer.patience={trainer.patience} counts evaluations, and the only one is at the end: give "
                f"trainer.evaluate_every_epochs=1 or trainer.evaluate_every_steps=N too"
            )
        self.check_precision()
        self.check_shares(process_count=1)
        self.check_capture(trainer.device, process_count=1)
        if trainer.compile and self.norm.not_compiled:
            raise ValueError(
                f"trainer.compile=true with norm={self.norm.name}: {self.norm.not_compiled}; use norm=inplace"
            )
        self._check_recomputation()
        if self.resume is not None and self.run_dir is None:
            raise ValueError(f"resume={self.resume} needs run_dir=…, the folder of the run to continue")

    def _check_library_network(self) -> None:
        """ValueError: weights, norm or activation do not fit torchvision's and timm's networks."""
        body = self.body
        norm = self.norm
        init = self.init
        if init.weights == PUBLISHED and not body.in_library:
            raise ValueError(f"init.weights={PUBLISHED} needs body=torchvision or body=timm, and body.network=NAME")
        if isinstance(body, TorchvisionBody) and body.weights is not None and init.weights is not None:
            raise ValueError(f"body.weights={body.weights} and init.weights={init.weights}: give one of them")
        if body.in_library and not norm.in_library_bodies:
            instead = "norm=inplace" if norm.inverts_activation else "norm=std trainer.recompute=activations"
            raise ValueError(
                f"norm={norm.name} with body={body.name}: its norms can be std, inplace or inplace_1; {instead} "
                f"keeps as little"
            )
        if norm.activation is None and norm.inverts_activation and self._was_trained_with_relu():
            raise ValueError(
                f"norm={norm.name} with networks that were trained with ReLU, which cannot be inverted: norm=std "
                f"trainer.recompute=activations keeps as little and changes nothing; norm.activation=leaky_relu "
                f"replaces the ReLUs, and trained weights are then a starting point"
            )
        if body.in_library and norm.activation not in (None, *LIBRARY_ACTIVATIONS):
            raise ValueError(
                f"norm.activation={norm.activation} with body={body.name}: expected one of "
                f"{', '.join(LIBRARY_ACTIVATIONS)}, in place of its ReLUs"
            )

    def _check_recomputation(self) -> None:
        """ValueError: trainer.recompute does not fit the body, the compiler or the keys of memory."""
        trainer = self.trainer
        if trainer.compile and trainer.recompute in ("activations", "budget"):
            raise ValueError(
                f"trainer.recompute={trainer.recompute} with trainer.compile=true: the compiler decides which "
                f"activations to keep; leave one out, or give trainer.recompute=blocks or sqrt, which it follows"
            )
        if trainer.recompute not in ("none", "activations") and self.body.is_reversible():
            raise ValueError(
                f"trainer.recompute={trainer.recompute} with body={self.body.name}: blocks, sqrt and budget are for "
                f"bodies that are not reversible; give trainer.recompute=none or activations"
            )
        if trainer.recompute == "budget" and self.memory.budget is None and self.memory.activations is None:
            raise ValueError(
                "trainer.recompute=budget needs a device's memory: give memory.budget=…, such as 12GiB, or "
                "memory.activations=…, the part of it that is left for activations"
            )
        if trainer.recompute != "budget" and self.memory.activations is not None:
            raise ValueError(f"memory.activations={self.memory.activations} needs trainer.recompute=budget")

    def _was_trained_with_relu(self) -> bool:
        """Whether the initial weights are of a network with ReLU."""
        return self.body.in_library or self.init.format in LIBRARIES

    def complete(self) -> None:
        """Give keys of norm, data and init that are null the values that follow from the body."""
        body = self.body
        data = self.data
        norm = self.norm
        if isinstance(body, TorchvisionBody) and body.weights is not None:
            self.init.weights = body.weights
            self.init.format = body.name
            body.weights = None
        expected = body.normalisation()
        if data.channels == COLOURS:  # others are measured
            data.mean = data.mean or list(expected.mean)
            data.std = data.std or list(expected.std)
        norm.activation = norm.activation or ("relu" if self._was_trained_with_relu() else "leaky_relu")
        if not body.in_library:  # libraries give each norm its own
            norm.momentum = norm.momentum or MOMENTUM

    def compiles_norms(self, device_type: str) -> bool:
        """Whether norms may compile code for their first inputs."""
        return not self.trainer.smoke and self.norm.compiles(device_type)

    def score_text(self, score: float) -> str:
        """The score for the console."""
        return f"{self.score_label} {100 * score:.2f} %"

    def apply_options(self, options: Any) -> None:
        """Take over this task's options of eval.py or scripts.predict (`schema.evaluation.TrainedNetwork`).

        ValueError: they do not fit the network or the images.
        """

    def doubts(self, extent: Extent) -> Iterator[str]:
        """Warnings where the settings look like a mistake in a training of this extent."""
        data = self.data
        if (self.body.frozen or self.body.frozen_norms != "none") and self.init.weights is None:
            key = "frozen=true" if self.body.frozen else f"frozen_norms={self.body.frozen_norms}"
            yield f"body.{key} without initial weights keeps random ones: give init.weights=FILE or body.weights"
        if extent.shared_count:
            yield (
                f"data.val_split={data.val_split}: {extent.shared_count:,} of its images are trained on (copies under "
                f"other names count), so their scores say nothing about other images"
            )
        if extent.image_count < data.crops_per_minibatch:
            yield (
                f"{extent.image_count} training images do not fill "
                f"data.crops_per_minibatch={data.crops_per_minibatch}: they are drawn more than once per epoch"
            )
        steps = self.trainer.steps
        if steps is not None and extent.step_count < steps and not self.trainer.smoke:
            yield (
                f"trainer.epochs={self.trainer.epochs} ends this training after {extent.step_count:,} of trainer.steps="
                f"{steps:,}, as the shorter counts: give trainer.epochs=null to take them all"
            )
        momentum = self.norm.momentum
        if momentum is not None and momentum > 0.5:
            yield (
                f"norm.momentum={momentum} is the newest minibatch's share of running statistics: if it is Keras's, "
                f"the share of the older ones, give norm.momentum={1 - momentum:.4g}"
            )
        average_doubt = self._doubt_of_average(extent.step_count)
        if average_doubt:
            yield average_doubt
        if extent.process_count > 1 and not self.norm.sync:
            crops = data.crops_per_minibatch // extent.process_count // self.trainer.accumulation_steps
            yield (
                f"norms normalise {crops} crop(s) at a time, as each process has its own statistics: "
                f"{self.norm.to_share} shares them"
            )

    def _doubt_of_average(self, step_count: int) -> str | None:
        """A warning if the EMA after so many steps is still mostly the weights of the first step; None if it is not."""
        decay = self.trainer.ema_decay
        share = 0.0 if decay is None or self.trainer.smoke else decay ** (step_count - 1)
        if share <= 0.1:
            return None
        advice = f"give at most {1 - 10 / step_count:.4g}" if step_count > 10 else "leave it out"
        return (
            f"trainer.ema_decay={decay} over {step_count:,} steps: {share:.0%} of the average, which is evaluated, "
            f"are weights of the first step; {advice}"
        )

    def check_precision(self) -> None:
        """Raise ValueError if the norm cannot compute in `trainer.precision`."""
        if self.norm.only_float32 and self.trainer.precision != "float32":
            raise ValueError(
                f"trainer.precision={self.trainer.precision} with norm={self.norm.name}: {self.norm.only_float32}; "
                f"give trainer.precision=float32 (precision=float32 to eval.py), or norm=inplace"
            )

    def check_shares(self, process_count: int) -> None:
        """Raise ValueError if a process would have too few images in a micro-batch."""
        fewest = self.fewest_on_each(process_count)
        parts = process_count * self.trainer.accumulation_steps
        at_a_time = self.data.crops_per_minibatch // parts
        if at_a_time < fewest:
            or_together = f", or {self.norm.to_share}" if process_count > 1 and not self.norm.sync else ""
            raise ValueError(
                f"{self.division(process_count)} gives {at_a_time} crop(s) at a time, and {self.fewest_at_a_time[1]}: "
                f"use at least {fewest * parts} crops{or_together}"
            )

    def fewest_on_each(self, process_count: int) -> int:
        """The images that each process needs in a micro-batch; synchronised norms count all processes' images."""
        return -(-self.fewest_at_a_time[0] // (process_count if self.norm.sync else 1))

    def check_capture(self, device_type: str, process_count: int) -> None:
        """Raise ValueError if trainer.capture=true and micro-batches cannot be captured in a CUDA graph."""
        problem = self.capture_problem(device_type, process_count) if self.trainer.capture is True else None
        if problem is not None:
            raise ValueError(f"trainer.capture=true: {problem}; {CAPTURE_ADVICE}")

    def capture_problem(self, device_type: str, process_count: int) -> str | None:
        """Why micro-batches cannot be captured in a CUDA graph; None if they can."""
        trainer = self.trainer
        if device_type == "cpu":
            return "only a CUDA device has graphs, and this is a CPU"
        if self.norm.not_captured:
            return self.norm.not_captured
        if trainer.compile:
            return "trainer.compile=true makes code that has graphs of its own"
        if self.data.crops_per_minibatch % (process_count * trainer.accumulation_steps):
            return f"{self.division(process_count)} makes micro-batches of several sizes, and a CUDA graph has one"
        if process_count > 1 and self.norm.sync:
            return f"norm.sync=true over {process_count} processes has not been tried in a CUDA graph"
        return None

    def capture_doubt(self, process_count: int, step_count: int) -> str | None:
        """Why trainer.capture=auto does not capture a run of so many steps that could be; None if it does."""
        if process_count > 1:
            return f"{process_count} processes were not measured with CUDA graphs (trainer.capture=true takes them)"
        if self.trainer.profile:
            return f"trainer.profile={self.trainer.profile} shows the calls that a CUDA graph replaces"
        if step_count < FEWEST_CAPTURED:
            return f"{step_count} steps gain little (fewer than {FEWEST_CAPTURED})"
        return None

    def division(self, process_count: int) -> str:
        """The split of a minibatch into micro-batches, for messages."""
        parts = self.trainer.accumulation_steps
        over = f" over {process_count} processes" if process_count > 1 else ""
        over += f" over trainer.accumulation_steps={parts}" if parts > 1 else ""
        return f"data.crops_per_minibatch={self.data.crops_per_minibatch}{over}"
