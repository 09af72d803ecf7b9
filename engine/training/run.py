"""A training run of any task on one rank, from its configuration to its results."""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from datasets import shared_images
from datasets.stream import Draws
from engine.assemble.contracts import builder
from engine.assemble.data import official_classes, workers_of
from engine.assemble.network import arithmetic
from engine.assemble.tasks import added_scores
from engine.checkpoint.files import first_difference
from engine.checkpoint.initial_weights import initialise
from engine.checkpoint.rank_states import (
    check_savable,
    random_states,
    restore_random_states,
    restore_states,
    saved_states,
)
from engine.checkpoint.run_directory import RunDirectory
from engine.configuration import config as configuration
from engine.process import plugins
from engine.process.allocations import forget_peak, peak_memory_mib
from engine.process.console import logger
from engine.process.distributed import World, cores_per_rank
from engine.process.stopping import SECONDS_TO_END, StopRequest, at_most
from engine.process.transfers import prefetched
from engine.records.evaluated import Dataset, Evaluated, print_results, write_results
from engine.records.metrics_logger import MetricsLogger
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import Extent, TrainingRun
from engine.training import advice, build
from engine.training.input_scale import ratio_of_scales
from engine.training.learner import Learner
from engine.training.resumption import Watch, has_passed
from keepless import share_plans

Config = TypeVar("Config", bound=TrainingRun)
Split = TypeVar("Split", bound=Dataset)


@dataclass
class Run(Generic[Config, Split]):
    """A training run on one rank, made by `preparation.open_run`. `learner` and `metrics` exist after `start`."""

    config: Config
    world: World
    stop: StopRequest
    directory: RunDirectory
    train_set: Split
    val_set: Split
    schedule: Schedule
    files: dict[str, list[str]]  # hashes of names, sizes and the labels' numbering, by split
    console: Console
    resumed: dict | None = None  # the checkpoint to resume from, after `start` without what the learner has loaded
    start_step: int = 0  # of that checkpoint
    watch: Watch | None = None  # follows the run
    learner: Learner = field(init=False)
    metrics: MetricsLogger = field(init=False)
    parts: dict[str, Any] = field(default_factory=dict)  # by name: what may keep a state, such as the loss
    loggers: dict[str, Any] = field(default_factory=dict)  # the run's own, by name

    @property
    def loss_name(self) -> str:
        """The loss, for messages."""
        return f"loss={self.config.loss.name}" if isinstance(self.config, SegmentationRun) else "loss"

    def recorded_config(self) -> dict:
        """The configuration for checkpoints and results: `trainer.capture` as was decided, `data.root` a whole path."""
        config = configuration.plain(self.config)
        config["trainer"]["capture"] = self.learner.captured is not None
        root = config["data"]["root"]
        if root is not None:  # commands may be started in other folders
            config["data"]["root"] = os.path.abspath(os.path.expanduser(root))
        return config

    def start(self, eager_because: str = "") -> None:
        """Make the learner (see `build.learner`), give it its initial or resumed weights, and open the records.

        ValueError: see `build.learner`, `initialise`; the checkpoint does not fit; or a score of one's own is none.
        """
        added_scores(self.config, self.val_set)  # for its errors: the first evaluation would be late to find them
        learner = build.learner(self.config, len(self.train_set.classes), self.schedule, self.world, eager_because)
        if self.resumed is not None:
            self._resume(learner, self.resumed)
            self.resumed = {part: self.resumed[part] for part in ("scores", "finished", "random", "parts")}
        elif self.config.init.weights is not None:
            self._initialise(learner)
        self._announce(learner)
        self.learner = learner
        if self.world.first:
            self._start_loggers()
        self.metrics = MetricsLogger(
            self.directory.path if self.world.first else None,
            self.console,
            score=self.config.score,
            total_steps=self.schedule.total_steps,
            start_step=self.start_step,
            previous_scores=self.resumed["scores"] if self.resumed else (),
            patience=self.schedule.patience,
            wait_warning=partial(self.config.data.waits, workers=workers_of(self.config.data), cores=cores_per_rank()),
            tell=self.tell_loggers,
        )
        if self.resumed and self.resumed["finished"] and self.start_step < self.schedule.total_steps:
            if self.metrics.ends_early:
                self._log_early_end()
            elif self.world.first:
                self.directory.results.unlink(missing_ok=True)  # of an early end, after which the run now goes on

    def _initialise(self, learner: Learner) -> None:
        """Load init.weights. ValueError: they do not fit."""
        logger.info(str(initialise(self.config, learner.network, self.train_set.classes)))
        if self.config.init.format is not None:  # our own files say how images were normalised
            forward = learner.forward.with_network(learner.network)
            ratio = ratio_of_scales(forward, self.train_set, max(self.config.data.crop()))
            if ratio is not None and self.world.first:
                logger.warning(advice.on_scale(self.config, ratio))

    def _start_loggers(self) -> None:
        """Make the run's own loggers. ValueError, naming the logger: it fails."""
        for name, choice in self.config.logger.items():
            with plugins.errors_named(f"logger={name} cannot begin"), self._same_random_numbers():
                config = configuration.plain(self.config)
                self.loggers[name] = builder("logger", choice)(self.directory.path, config=config)

    def _log_early_end(self) -> None:
        """Say why the resumed run had ended before its last step, and how it goes on."""
        longer = "a larger trainer.patience continues it, and null to its last step"
        place = f"{self.directory.path} has ended early, after step {self.start_step:,}"
        why = advice.why_ended_early(self.config, self.metrics)
        logger.info(f"{place}: {why}. It is evaluated again; {longer}")

    def _resume(self, learner: Learner, state: dict) -> None:
        """Load the checkpoint to resume. ValueError: it has other classes or does not fit the learner."""
        changed_files = plugins.changed_since(state["plugins"])
        if changed_files:
            names = ", ".join(changed_files)
            logger.warning(f"since {self.directory.resumed} these files of plugins have changed: {names}")
        classes = list(self.train_set.classes)
        if state["classes"] != classes:
            problem = f"its classes differ: {first_difference(state['classes'], classes)}"
            raise self._resume_error(problem, "Give the dataset's classes their names and order again")
        try:
            learner.load_state_dict(state)
        except ValueError as error:
            is_of_pytorch = type(learner.optimizer).__module__.startswith("torch.")
            if is_of_pytorch or "its optimiser's" not in str(error):
                raise self._resume_error(error) from error
            cure = f"Let the state of optim={self.config.optim.name} keep the shapes of its first step"
            raise self._resume_error(error, cure) from error

    def _resume_error(self, problem: str | ValueError, cure: str = "Restore the checkpoint") -> ValueError:
        """An error that names the run and its checkpoint, says why the run cannot be resumed, and what to do."""
        return ValueError(
            f"run_dir={self.directory.path} cannot be continued from {self.directory.resumed}, of step "
            f"{self.start_step}: {problem}. {cure}, or give another run_dir to start a new run"
        )

    def begin(self, loss: Any, minibatches: Any) -> None:
        """Restore the parts and the random numbers of a resumed run. (Constructors of one's own may have drawn some.)

        ValueError: a part's state cannot be saved or loaded.
        """
        self.parts = self._parts(loss, minibatches)
        saved_states(self.parts, self.world)  # an error now is better than at the first checkpoint
        check_savable(f"optim={self.config.optim.name}", self.learner.optimizer.state_dict())
        if self.resumed is not None:
            try:
                restore_states(self.parts, self.resumed["parts"], self.world)
            except ValueError as error:
                raise self._resume_error(error) from error
            restore_random_states(self.resumed["random"], self.world)

    def _parts(self, loss: Any, minibatches: Any) -> dict[str, Any]:
        """What may keep a state besides the learner, by the names that messages have."""
        parts = {self.loss_name: loss, **{f"logger={name}": part for name, part in self.loggers.items()}}
        draws = getattr(minibatches, "batch_sampler", None)
        if isinstance(draws, Draws):
            functions = getattr(minibatches.dataset.augmentations, "by_name", {})
            parts |= {f"augmentations={name}": function for name, function in functions.items()}
            parts[draws.name] = draws
        return parts

    def deliver_minibatches(self, minibatches: Iterable[dict], loss: Any) -> Iterator[dict]:
        """Yield the minibatches on the device, one for each step.

        The watch follows the run, and notes each step. A sampler's draws of the step are taken. If the loss asks for
        batches, the minibatch gets the numbers of its step and epoch.

        ValueError: a step's learning rate is no rate.
        """
        asks_for_batch = getattr(loss, "asks_for_batch", False)
        draws = getattr(minibatches, "batch_sampler", None)
        if self.watch is not None:
            self.watch.follow_run(self, loss)
        for step, minibatch in enumerate(prefetched(minibatches, self.world.device), start=self.start_step + 1):
            self._check_rates(step)
            step_draws = draws.take() if isinstance(draws, Draws) else []
            if self.watch is not None:
                self.watch.note_step(step, step_draws, minibatch)
            if asks_for_batch:
                minibatch |= {"step": step, "epoch": self.schedule.epoch(step)}
            yield minibatch

    def _check_rates(self, step: int) -> None:
        """ValueError: a learning rate of the step is no number, negative or not finite."""
        for group in self.learner.optimizer.param_groups:
            rate: Any = group["lr"]
            if not isinstance(rate, (Real, Tensor)) or not 0 <= rate < math.inf:  # type: ignore[operator]
                text = f"lr_schedule={self.config.lr_schedule.name} gives the learning rate {rate!r}"
                raise ValueError(f"{text} in step {step}: expected a number, 0 or more")

    def _same_random_numbers(self) -> AbstractContextManager:
        """Context whose code, which is not ours, changes none of the numbers that training draws."""
        return torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else [])

    def tell_loggers(self, method: str, *arguments: Any) -> None:
        """Call a method on each of the run's own loggers that has it. Their errors are only logged.

        The methods are scalars(step, {name: number}), picture(step, name, uint8 (H, W, 3)), and end(status), where
        the status is finished, stopped or failed.
        """
        for name, part in self.loggers.items():
            try:
                with at_most(SECONDS_TO_END), self._same_random_numbers():
                    getattr(part, method, lambda *_: None)(*copy.deepcopy(arguments))
            except (Exception, SystemExit) as error:  # anything, from a service that is not ours
                logger.warning(f"logger={name}: {type(error).__name__}: {error}")

    def share_plans(self) -> None:
        """Make all ranks follow rank 0's plans, because ranks measure different times. Every rank must call it."""
        if self.config.trainer.recompute == "budget":
            share_plans(self.learner.network)

    def _announce(self, learner: Learner) -> None:
        """Log warnings about unusual settings, and what is trained."""
        if self.world.first:
            for doubt in self.config.doubts(self._extent()):
                logger.warning(doubt)
        for line in self._introduction(learner):
            logger.info(line)

    def _extent(self) -> Extent:
        """What the run goes over. Reads validation images that may be copies of training images."""
        return Extent(
            class_count=len(self.train_set.classes),
            image_count=len(self.train_set),
            process_count=self.world.size,
            step_count=self.schedule.total_steps,
            shared_count=shared_images(self.train_set, self.val_set, read_files=self.config.data.verify),
            official_class_count=official_classes(self.config.data),
        )

    def _introduction(self, learner: Learner) -> Iterator[str]:
        """Lines for the log: how the run computes, its size and length, and what to expect of the first steps."""
        config = self.config
        world = self.world
        order = config.data.order_taken(self.train_set.classes)
        if order is not None:
            yield order
        yield self._settings(learner)
        if world.first and self.watch is None and not has_passed(config):
            yield "no debug=resume has passed with these plugins: if one keeps something, a resumed run may differ"
        parameters = list(learner.network.parameters())
        size = f"{sum(parameter.numel() for parameter in parameters):,} parameters"
        frozen_count = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
        if frozen_count:
            size += f", {frozen_count:,} of them frozen"
        yield (
            f"{self.directory.path}: {size}, {len(self.train_set)} training and {len(self.val_set)} validation images, "
            f"steps {self.start_step} to {self.schedule.total_steps} on {world.size} x {world.device.type}, data "
            f"workers of each: {workers_of(config.data)}"
        )
        if config.trainer.compile or config.compiles_norms(world.device.type):
            yield "the first steps may take minutes, as code is compiled and kept for later runs"
        if advice.gains_by_bfloat16(config, world.device):
            yield advice.BFLOAT16

    def _settings(self, learner: Learner) -> str:
        """For the log: initial weights, how a step computes, what is frozen, each group's rate and decay."""
        config = self.config
        trainer = config.trainer
        on_cuda = self.world.device.type == "cuda"
        why_eager = f": {learner.eager_because}" if on_cuda and learner.eager_because else ""
        weights = config.init.weights or getattr(config.body, "weights", None) or "random"
        settings = [
            f"initial weights {weights}",
            f"recomputation {trainer.recompute}",
            f"precision {trainer.precision}",
            f"TF32 {'on' if trainer.tf32 and on_cuda else 'off'}",
            f"capture {'off' if learner.captured is None else 'on'}{why_eager}",
            f"compile {'on' if trainer.compile else 'off'}",
        ]
        if isinstance(config, SegmentationRun):
            settings.append(f"sampler {config.sampler.name}")
        frozen_norms = config.body.frozen_norms
        frozen = "none" if frozen_norms == "none" else f"norms ({frozen_norms})"
        settings.append(f"frozen {'body' if config.body.frozen else frozen}")
        for group in learner.optimizer.param_groups:
            count = sum(parameter.numel() for parameter in group["params"])
            rate = group.get("initial_lr", group["lr"])
            settings.append(f"{count:,} parameters at lr {rate:g}, weight decay {group['weight_decay']:g}")
        return "; ".join(settings)

    def save(self, step: int, best: bool = False) -> None:
        """Start writing the last checkpoint, or the `best`. Every rank must call it.

        Raises OSError if the previous one could not be written, and FloatingPointError if a weight is not finite.
        """
        if not best and self.schedule.scores(step):  # the saved network is the scored one
            self.world.share(self.learner.evaluated.network.buffers())  # statistics of norms that are not synchronised
        state = {
            "task": self.config.task,
            **self.learner.state_dict(step),
            "random": random_states(self.world),
            "parts": saved_states(self.parts, self.world),
            "total_steps": self.schedule.total_steps,
            "finished": step == self.schedule.total_steps or self.metrics.ends_early,
            "scores": [[step, score] for step, score in self.metrics.scores.items()],
            "data": self.files,
            "config": self.recorded_config(),
            "plugins": plugins.hashes(),
            "best": self.metrics.best,
            "classes": list(self.train_set.classes),
        }
        check_savable(f"optim={self.config.optim.name}", state["optimizer"])
        if self.train_set.palette is not None:
            state["palette"] = [list(colour) for colour in self.train_set.palette]
            state["label_ids"] = list(self.train_set.label_ids)
        if self.train_set.mean_image is not None:
            state["mean_image"] = torch.from_numpy(self.train_set.mean_image)
        if self.world.first:
            self.directory.start_saving(state, best)

    def evaluate(self, step: int, evaluate: Callable[[], Evaluated]) -> Evaluated:
        """Evaluate, record the scores, and save the network if it is the best so far, or if the run ends early.

        Every rank must call it.
        """
        self.directory.finish_saving()  # the evaluation forks, and a new process must not inherit the locks of a thread
        self.metrics.note_memory(peak_memory_mib(self.world.device))
        if self.learner.captured is not None:
            self.learner.captured.release()
        arithmetic(self.config.trainer)  # or cuDNN would search for kernels for every size of an image
        with self._same_random_numbers():  # scores of one's own may draw some
            evaluated = evaluate()
        arithmetic(self.config.trainer, fixed_sizes=True)
        self.directory.check_in_place()
        forget_peak(self.world.device)  # an evaluation may need more than training
        score = evaluated.scores[self.config.score]
        best = self.metrics.best
        if score > (-math.inf if best is None else best[1]):
            self.save(step, best=True)
        self.metrics.record_evaluation(step, self.schedule.epoch(step), evaluated)  # the scores are equal on all ranks
        if step < self.schedule.total_steps and self.metrics.ends_early:
            self.save(step)
            self.metrics.end_early(step, advice.why_ended_early(self.config, self.metrics))
        self.metrics.pause_ended()
        return evaluated

    def conclude(self, evaluated: Evaluated) -> dict:
        """Write the last checkpoint's results; print them and the run's summary."""
        self.directory.finish_saving()
        results = write_results(
            self.directory.results if self.world.first else None,
            evaluated,
            self.val_set,
            checkpoint=self.directory.last,
            config=self.recorded_config(),
        )
        split = self.val_set
        part = f" on {evaluated.images} of {len(split)} images" if evaluated.images < len(split) else ""
        print_results(self.console, evaluated, f"{split.name} {split.split}, last checkpoint{part}")
        evaluate = partial(advice.evaluation_command, self.config)
        last, best = self.directory.last, self.directory.best
        summary = self.metrics.summary(last, best, lambda score: self.config.score_text(score) + part, evaluate)
        self.console.print(summary, soft_wrap=True)
        logger.debug(summary)
        return results
