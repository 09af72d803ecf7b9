"""Keys of what users add: plugins; and augmentations, loggers and further scores, of which there may be several."""

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from engine.schema.keys import choice, key


@dataclass
class Plugins:
    plugins: list[str] = key([])  # modules of your own, see docs/extending.md; only the command line names them
    trust_plugins: bool = key(False, per_machine=True)  # import plugins that other users own or can write to, too


@dataclass
class Augmentation:
    """Changes of a training crop, in the data worker."""

    name: str = MISSING
    is_one_of_several: ClassVar[bool] = True
    called_with: ClassVar[tuple[str, ...]] = ()


@dataclass
class Logger:
    """Another place for a training's records, such as a service. It is made on rank 0 of trainings alone."""

    name: str = MISSING
    is_one_of_several: ClassVar[bool] = True
    called_with: ClassVar[tuple[str, ...]] = ("folder", "config")


@dataclass
class Score:
    """Further scores of an evaluation, from each image's prediction and label."""

    name: str = MISSING
    is_one_of_several: ClassVar[bool] = True
    called_with: ClassVar[tuple[str, ...]] = ("classes", "ignore_index")
    is_absent: ClassVar[bool]  # whether a checkpoint names it, and no loaded plugin has it


@choice("scores")
class Dice(Score):
    """Dice of each class, and their mean."""

    name: str = "dice"
    builds: ClassVar[str] = "engine.segmentation.dice.DiceScores"
