"""Keys of what a training may have several of, or none: augmentations, loggers and further scores."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Augmentation:
    """Changes of a training crop, in the data worker."""

    name: str = MISSING


@dataclass
class Logger:
    """Another place for a training's records, such as a service. It is made on rank 0 of trainings alone."""

    name: str = MISSING


@dataclass
class Score:
    """Further scores of an evaluation, from each image's prediction and label."""

    name: str = MISSING
