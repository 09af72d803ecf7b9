"""A training run of any task on one rank, from its configuration to its results."""

import copy
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from torch import nn

from datasets import reading_errors, shared_images, verify
from datasets.levels import measured
from datasets.stream import Draws
from engine.assemble.contracts import builder, check_choices, parts_named
from engine.assemble.data import official_classes, shortfalls, workers_of
from engine.assemble.network import arithmetic
from engine.assemble.optimization import schedule_of
from engine.assemble.tasks import added_scores
from engine.checkpoint.files import first_difference, has_ended
from engine.checkpoint.initial_weights import check_exists, initialise, normalisation_of
from engine.checkpoint.part_states import restore_states, saved_states
from engine.checkpoint.random_states import random_states, restore_random_states
from engine.checkpoint.run_directory import RunDirectory, new_run_path
from engine.configuration import config as configuration
from engine.process import plugins
from engine.process.allocations import forget_peak, keep_freed_memory, peak_memory_mib
from engine.process.console import counted, log_to, logger, make_console
from engine.process.distributed import World, cores_per_rank, joined
from engine.process.output_files import write_file
from engine.process.stopping import SECONDS_TO_END, Preempted, StopRequest, at_most
from engine.process.transfers import prefetched
from engine.records.evaluated import Dataset, Evaluated, print_results, write_results
from engine.records.metrics_logger import MetricsLogger
from engine.schema.keys import deciding
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.training import advice, build
from engine.training.input_scale import other_scale
from engine.training.learner import Learner, Rates
from engine.training.papers import paper_of, weights_of
from engine.training.resumption import Watch, record
from keepless import share_plans
from models.checkpoints.published import Normalisation

Config = TypeVar("Config", bound=TrainingRun)
Split = TypeVar("Split", bound=Dataset)


@dataclass
class Run(Generic[Config, Split]):
    """A training run on one rank, made by `opened`. `learner` and `metrics` exist after `start`."""

    config: Config
    world: World
    stop: StopRequest
    directory: RunDirectory
    train_set: Split
    val_set: Split
    schedule: Schedule
    files: dict[str, list[str]]  # hashes of names, sizes and the labels' numbering, by split
    console: Console
    resumed: dict | None = None  # the checkpoint to resume from; None in a new run, and after the learner loaded it
    start_step: int = 0  # of that checkpoint
    learner: Learner = field(init=False)
    metrics: MetricsLogger = field(init=False)
    saved: dict[str, Any] = field(default_factory=dict)  # of a resumed run: what `begin` restores
    parts: dict[str, Any] = field(default_factory=dict)  # of the run that may keep a state, by name
    watch: Watch | None = None  # follows the run
    loggers: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def plain_config(self) -> dict:
        """The configuration for files. It does not change, and converting it takes 10 ms."""
        return configuration.plain(self.config)

    def recorded_config(self) -> dict:
        """The configuration for checkpoints and results: `trainer.capture` as was decided, `data.root` a whole path."""
        trainer = self.plain_config["trainer"] | {"capture": self.learner.captured is not None}
        root = self.plain_config["data"]["root"]
        data = {"root": None if root is None else os.path.abspath(os.path.expanduser(root))}  # for other folders
        return self.plain_config | {"trainer": trainer, "data": self.plain_config["data"] | data}

    def start(self, make: Callable[[], nn.Module], eager_because: str = "") -> None:
        """Make the learner (see `build.learner`), give it its initial or resumed weights, and open the records.

        ValueError: see `build.learner`, `initialise`; the checkpoint does not fit; or a score of one's own is none.
        """
        added_scores(self.config, self.val_set)  # the first evaluation is late to find what is wrong
        learner = build.learner(self.config, make, self.schedule, self.world, eager_because)
        known: list[tuple[int, float]] = []
        had_ended = self.resumed is not None and has_ended(self.resumed)
        if self.resumed is not None:
            self._resume(learner, self.resumed)
            known = self.resumed["scores"]
        elif self.config.init.weights is not None:
            logger.info(str(initialise(self.config, learner.network, self.train_set.classes)))
            if self.config.init.format is not None:  # our own files say how images were normalised
                forward, side = learner.forward.through(learner.network), max(self.config.data.crop())
                if (ratio := other_scale(forward, self.train_set, side)) is not None and self.world.first:
                    logger.warning(advice.on_scale(self.config, ratio))
        self.resumed = None  # frees the memory of a network and its momentum
        self._announce(learner)
        self.learner = learner
        for name, own in self.config.logger.items() if self.world.first else ():
            with plugins.errors_named(f"logger={name} cannot begin"), self._same_random_numbers():
                made = builder("logger", own)(self.directory.path, config=copy.deepcopy(self.plain_config))
            self.loggers[name] = made
        self.metrics = MetricsLogger(
            self.directory.path if self.world.first else None,
            self.console,
            score=self.config.score,
            total_steps=self.schedule.total_steps,
            start_step=self.start_step,
            known=known,
            patience=self.schedule.patience,
            waits=partial(self.config.data.waits, workers=workers_of(self.config.data), cores=cores_per_rank()),
            config_text=self.directory.config.read_text() if self.world.first and self.start_step == 0 else "",
            tell=self.tell,
        )
        self.metrics.scores = self.world.gather(self.metrics.scores)[0]
        if had_ended and self.start_step < self.schedule.total_steps:
            if self.metrics.ends_early:
                longer = "a larger trainer.patience continues it, and null to its last step"
                place = f"{self.directory.path} has ended early, after step {self.start_step:,}"
                why = advice.ended_early(self.config, self.metrics)
                logger.info(f"{place}: {why}. It is evaluated again; {longer}")
            elif self.world.first:
                self.directory.results.unlink(missing_ok=True)  # the run goes on

    def _resume(self, learner: Learner, state: dict) -> None:
        """ValueError: the checkpoint has other classes or does not fit the learner."""
        cure = "Restore the checkpoint"
        if changed := plugins.changed_since(state.get("plugins", {})):
            logger.warning(f"since {self.directory.resumed} these files of plugins have changed: {', '.join(changed)}")
        try:
            if state["classes"] != list(self.train_set.classes):
                cure = "Give the dataset's classes their names and order again"
                raise ValueError(f"its classes differ: {first_difference(state['classes'], self.train_set.classes)}")
            learner.load_state_dict(state)
        except ValueError as error:
            raise _not_continued(self, error, cure) from error
        self.saved = {name: state[name] for name in ("random", "parts") if name in state}

    def begin(self, loss: Any, minibatches: Any) -> None:
        """Continue what parts keep, and the random numbers of a resumed run; constructors of one's own may draw some.

        ValueError: a part's state cannot be saved or loaded.
        """
        config, learner = self.config, self.learner
        self.parts = {f"loss={config.loss.name}" if isinstance(config, SegmentationRun) else "loss": loss}
        self.parts[f"lr_schedule={config.lr_schedule.name}"] = Rates(learner.scheduler, learner.optimizer)
        self.parts |= {f"logger={name}": made for name, made in self.loggers.items()}
        if isinstance(draws := getattr(minibatches, "batch_sampler", None), Draws):
            functions = getattr(minibatches.dataset.augmentations, "by_name", {})
            self.parts |= {f"augmentations={name}": function for name, function in functions.items()}
            self.parts[draws.name] = draws
        saved_states(self.parts, self.world)  # before the first step
        if self.start_step:
            try:
                if "parts" in self.saved:  # of older versions it is not
                    restore_states(self.parts, self.saved["parts"], self.world)
                restore_random_states(self.saved.get("random"), self.world)
            except ValueError as error:
                raise _not_continued(self, error, "Restore the checkpoint") from error

    def taken(self, minibatches: Iterable[dict], loss: Any) -> Iterator[dict]:
        """The minibatches on the device, as steps take them. ValueError: a step's learning rate is none."""
        draws = getattr(minibatches, "batch_sampler", None)
        if self.watch is not None:
            self.watch.begin(self, loss)
        for step, minibatch in enumerate(prefetched(minibatches, self.world.device), start=self.start_step + 1):
            for group in self.learner.optimizer.param_groups:
                if not 0 <= group["lr"] < math.inf:
                    rate = f"lr_schedule={self.config.lr_schedule.name} gives the learning rate {group['lr']}"
                    raise ValueError(f"{rate} in step {step}: expected 0 or more")
            drawn = draws.take() if isinstance(draws, Draws) else []
            if self.watch is not None:
                self.watch.look(step, drawn, minibatch)
            yield minibatch

    def _same_random_numbers(self) -> AbstractContextManager:
        """Context whose code, which is not ours, changes none of the numbers that training draws."""
        return torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else [])

    def tell(self, what: str, *given: Any) -> None:
        """Call a method on each of the run's own loggers that has it. Their errors are only logged.

        The methods are scalars(step, {name: number}), picture(step, name, uint8 (H, W, 3)), and end(status), where
        the status is finished, stopped or failed.
        """
        for name, own in self.loggers.items():
            try:
                with at_most(SECONDS_TO_END), self._same_random_numbers():
                    getattr(own, what, lambda *_: None)(*copy.deepcopy(given))
            except (Exception, SystemExit) as error:  # anything, from a service that is not ours
                logger.warning(f"logger={name}: {type(error).__name__}: {error}")

    def share_plans(self) -> None:
        """Make all ranks follow rank 0's plans, because ranks measure different times. Every rank must call it."""
        if self.config.trainer.recompute == "budget":
            share_plans(self.learner.network)

    def _announce(self, learner: Learner) -> None:
        """Log the size and length of the run, and warnings about unusual settings."""
        classes, images = len(self.train_set.classes), len(self.train_set)
        if self.world.first:
            shared = shared_images(self.train_set, self.val_set, read_files=self.config.data.verify)
            official, steps = official_classes(self.config.data), self.schedule.total_steps
            for doubt in self.config.doubts(classes, images, self.world.size, steps, shared, official):
                logger.warning(doubt)
        if (order := self.config.data.order_taken(self.train_set.classes)) is not None:
            logger.info(order)
        parameters = sum(parameter.numel() for parameter in learner.network.parameters())
        frozen = sum(parameter.numel() for parameter in learner.network.parameters() if not parameter.requires_grad)
        logger.info(self._applied(learner))
        if (file := record(self.config)) is not None and not file.exists() and self.world.first and self.watch is None:
            logger.info(
                "no debug=resume has passed with these plugins: if one keeps something, a resumed run may differ"
            )
        logger.info(
            f"{self.directory.path}: {parameters:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}, "
            f"{len(self.train_set)} training and {len(self.val_set)} validation images, steps {self.start_step} to "
            f"{self.schedule.total_steps} on {self.world.size} x {self.world.device.type}, "
            f"data workers of each: {workers_of(self.config.data)}"
        )
        if self.config.trainer.compile or self.config.compiles_norms(self.world.device.type):
            logger.info("the first steps may take minutes, as code is compiled and kept for later runs")
        if self.world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            if (line := advice.on_precision(self.config)) is not None:
                logger.info(line)

    def _applied(self, learner: Learner) -> str:
        """For the log: initial weights, how a step computes, what is frozen, each group's rate and decay."""
        config, trainer = self.config, self.config.trainer
        on_cuda, words = self.world.device.type == "cuda", ("off", "on")
        why_eager = f": {learner.eager_because}" if on_cuda and learner.eager_because else ""
        weights = config.init.weights or getattr(config.body, "weights", None) or "random"
        said = [f"initial weights {weights}", f"recomputation {trainer.recompute}", f"precision {trainer.precision}"]
        said += [f"TF32 {words[trainer.tf32 and on_cuda]}", f"capture {words[learner.captured is not None]}{why_eager}"]
        said.append(f"compile {words[trainer.compile]}")
        if (sampler := getattr(config, "sampler", None)) is not None:
            said.append(f"sampler {sampler.name}")
        norms = config.body.frozen_norms
        said.append(f"frozen {'body' if config.body.frozen else 'none' if norms == 'none' else f'norms ({norms})'}")
        for group in learner.optimizer.param_groups:
            count = sum(parameter.numel() for parameter in group["params"])
            rate = group.get("initial_lr", group["lr"])
            said.append(f"{count:,} parameters at lr {rate:g}, weight decay {group['weight_decay']:g}")
        return "; ".join(said)

    def save(self, step: int, best: bool = False) -> None:
        """Start writing the last checkpoint, or the `best`. Every rank must call it.

        Raises OSError if the previous one could not be written, and FloatingPointError if a weight is not finite.
        """
        if not best and self.schedule.scores(step):  # the saved network is the scored one
            self.world.share_buffers(self.learner.evaluated.network)  # its running statistics, equal on all ranks
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
        self.directory.saved()  # the evaluation forks, and a new process must not inherit the locks of a thread
        self.metrics.note_memory(peak_memory_mib(self.world.device))
        if self.learner.captured is not None:
            self.learner.captured.release()
        arithmetic(self.config.trainer)  # or cuDNN would search for kernels for every size of an image
        with self._same_random_numbers():  # scores of one's own may draw some
            evaluated = evaluate()
        arithmetic(self.config.trainer, fixed_sizes=True)
        self.directory.check_in_place()
        forget_peak(self.world.device)  # an evaluation may need more than training
        score, best = evaluated.scores[self.config.score], self.metrics.best
        if score > (-math.inf if best is None else best[1]):
            self.save(step, best=True)
            self.directory.saved()  # before the record: if killed in between, the run evaluates again
        self.metrics.scores[step] = score  # equal on all ranks, and so is what follows
        if ends_early := step < self.schedule.total_steps and self.metrics.ends_early:
            self.save(step)
            self.directory.saved()
        self.metrics.evaluation(step, self.schedule.epoch(step), evaluated)
        if ends_early:
            self.metrics.ended(step, advice.ended_early(self.config, self.metrics))
        self.metrics.pause_ended()
        return evaluated

    def conclude(self, evaluated: Evaluated) -> dict:
        """Write the last checkpoint's results; print them and the run's summary."""
        self.directory.check_in_place()
        results = write_results(
            self.directory.results if self.world.first else None,
            evaluated,
            self.val_set,
            checkpoint=self.directory.last,
            config=self.recorded_config(),
        )
        images, whole = evaluated.images, len(self.val_set)
        of = f" on {images} of {whole} images" if images < whole else ""
        print_results(self.console, evaluated, f"{self.val_set.name} {self.val_set.split}, last checkpoint{of}")
        evaluate = partial(advice.evaluation_command, self.config)
        last, best = self.directory.last, self.directory.best
        summary = self.metrics.summary(last, best, lambda score: self.config.score_text(score) + of, evaluate)
        self.console.print(summary, soft_wrap=True)
        logger.debug(summary)
        return results


@contextmanager
def opened(
    config: Config, command: str, find: Callable[[Any], tuple[Split, Split]], watch: Watch | None = None
) -> Iterator[Run[Config, Split]]:
    """Join the other ranks, find the data and the checkpoint to resume, open the log, check the data.

    Args:
        command: how the run was started, kept in config.yaml.
        find: find(config.data) returns the training and the validation split.
        watch: takes few images of the first.

    Raises:
        ValueError: configuration, data and run directory do not fit each other, or differ between ranks.
        OSError: a checkpoint cannot be written, data do not arrive in time, or another rank is lost.
    """
    data, trainer = config.data, config.trainer
    with (
        joined(trainer.device, trainer.timeout_seconds, keys="trainer.") as world,
        reading_errors(data.timeout_seconds, keys="data.", advice=" resume=auto continues the run"),
        StopRequest() as stop,
        parts_named(config),
    ):
        check_choices(config)
        config.check_shares(world.size)
        config.check_capture(world.device.type, world.size)
        words = [word for word in shlex.split(command) if "=" in word]
        given = deciding(words, config)
        directory = RunDirectory(world.gather(config.run_dir or new_run_path(data.name, config.norm.name, given))[0])
        with directory.in_use(config):
            train_set, val_set = find(data)
            experiments = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("experiment=")]
            doubts = _doubts(config, experiments, train_set, val_set)
            train_set = train_set if watch is None else watch.few(train_set, data.crops_per_minibatch)
            run = _agree(config, world, stop, directory, train_set, val_set)
            run.watch = watch
            if run.resumed is None:
                check_exists(config.init)
            log_to(run.console, directory.log if world.first else None, world.rank)
            logger.debug(command)
            if directory.notice and world.first:
                logger.warning(directory.notice)
            for doubt in doubts if world.first else ():
                logger.warning(doubt)
            _look_at_images(run, command)
            arithmetic(trainer, fixed_sizes=True)
            if world.device.type == "cpu":
                keep_freed_memory()  # saves a quarter of the time per step: docs/results/steps.md
            try:
                yield run
            except BaseException as error:
                run.tell("end", "stopped" if isinstance(error, (Preempted, KeyboardInterrupt)) else "failed")
                raise
            run.tell("end", "finished")


def _doubts(config: TrainingRun, experiments: list[str], train_set: Dataset, val_set: Dataset) -> list[str]:
    """Sentences about data and initial weights. ValueError: images of a dataset are missing for a row of a paper."""
    data, doubts = config.data, [f"training split {train_set.split}: {remark}" for remark in train_set.remarks]
    doubts += [f"validation split {val_set.split}: {remark}" for remark in val_set.remarks]
    for sentence in shortfalls(data, train_set, val_set):
        if any(paper_of(name).get("table") for name in experiments) and not (data.incomplete or config.trainer.smoke):
            cure = "get the rest (scripts.verify_data names the layout), or give data.incomplete=true"
            raise ValueError(f"experiment={experiments[-1]} is a row of a paper, but {sentence}: {cure}")
        doubts.append(f"{sentence}: an archive is not unpacked, or a folder is missing; scores compare with none")
    if config.init.weights is None and any(map(weights_of, experiments)):
        doubts.append(advice.on_random_weights(experiments[-1]))
    return doubts


def _look_at_images(run: Run, command: str) -> None:
    """Verify the images, measure their channels if the configuration asks for it, and write this down."""
    data = run.config.data
    _write_config(run, command)
    with run.world.first_goes_ahead() as first:
        if data.verify and first:
            doubts = verify_with_progress(run.train_set, run.console)
            doubts += data.doubts_of_sizes(run.train_set.sizes)
            for doubt in [*doubts, *verify_with_progress(run.val_set, run.console, "validation image")]:
                logger.warning(doubt)
        measured = _normalisation(run) if data.is_measured and first else None
    if data.is_measured:
        data.mean, data.std = map(list, run.world.gather(measured)[0] or ())
        _write_config(run, command)


def _agree(
    config: Config, world: World, stop: StopRequest, directory: RunDirectory, train_set: Split, val_set: Split
) -> Run[Config, Split]:
    """Compare the configuration of all ranks, lock the directory, compare data and checkpoint, and return the run."""
    schedule = schedule_of(config, images=len(train_set))
    world.check_equal(
        configuration.values_but(config, "per_machine"), "start all of them with the same keys and values"
    )
    with world.first_goes_ahead() as first:
        if first:
            directory.lock()
    splits = {"training": train_set, "validation": val_set}
    files = {split: [*data.names_and_sizes(), data.numbering] for split, data in splits.items()}
    said = {split: "; ".join([f"{len(data)} images", *data.remarks]) for split, data in splits.items()}
    resumed = directory.checkpoint_to_resume(config, schedule.total_steps, files, said)
    found = {
        **{f"{split} images": len(data) for split, data in splits.items()},
        "steps": schedule.total_steps,
        "steps in the checkpoint": 0 if resumed is None else resumed["step"],
        "files": " ".join(digest[:8] for split in files.values() for digest in split),
    }
    world.check_equal(found, f"every machine needs the same data, and all must share the folder {directory.path}")
    console, start_step = make_console(world.rank), resumed["step"] if resumed else 0
    return Run(config, world, stop, directory, train_set, val_set, schedule, files, console, resumed, start_step)


def _not_continued(run: Run, error: ValueError, cure: str) -> ValueError:
    return ValueError(
        f"run_dir={run.directory.path} cannot be continued from {run.directory.resumed}, of step {run.start_step}: "
        f"{error}. {cure}, or give another run_dir to start a new run"
    )


def _write_config(run: Run, command: str) -> None:
    """Write the configuration of a new run, and how it was started."""
    if run.resumed is not None or not run.world.first:
        return
    head = f"# {command}\n# {run.world.size} x {run.world.device.type}\n"
    for name, hashes in plugins.hashes().items():
        head += "".join(f"# plugin {name}: {file} {digest}\n" for file, digest in hashes.items())
    write_file(run.directory.config, head + configuration.yaml(run.config))


def _normalisation(run: Run) -> Normalisation:
    """Mean and standard deviation of each channel, where they are not given: of init.weights, or measured."""
    data = run.config.data
    if (found := normalisation_of(run.config.init, data.channels)) is None:
        with counted(run.console, "measuring the channels") as progress:
            found = Normalisation(*map(tuple, measured(run.train_set, progress)))
        logger.info(f"data.channels={data.channels}: measured mean {[*found.mean]}, std {[*found.std]}")
    return Normalisation(tuple(data.mean or found.mean), tuple(data.std or found.std))


def verify_with_progress(
    dataset: Dataset, console: Console, images: str = "training image", keys: str | None = "data."
) -> list[str]:
    """Run `verify` with a progress bar."""
    with counted(console, f"checking {dataset.name} {dataset.split}") as progress:
        return verify(dataset, None, progress, keys, images)
