"""The score `dice`: of each class and their mean, over all images."""

from collections.abc import Sequence

import numpy as np


class DiceScores:
    """2 TP / (2 TP + FP + FN) of each class, from the confusion matrix; NaN for a class that occurs nowhere.

    `counts`: int64 (classes, classes), pixels by label and prediction.
    """

    def __init__(self, classes: Sequence[str], ignore_index: int):
        self.classes = classes
        self.ignore_index = ignore_index
        self.counts = np.zeros((len(classes), len(classes)), np.int64)

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        labelled = np.not_equal(label, self.ignore_index)
        pairs = np.asarray(label)[labelled].astype(np.int64) * len(self.classes) + np.asarray(prediction)[labelled]
        self.counts += np.bincount(pairs, minlength=self.counts.size).reshape(self.counts.shape)

    def scores(self) -> dict[str, float]:
        counted = self.counts.sum(axis=0) + self.counts.sum(axis=1)
        dice = np.where(counted, 2 * np.diag(self.counts) / np.maximum(counted, 1), np.nan)
        mean = float(np.nanmean(dice)) if counted.any() else float("nan")
        return {"dice": mean, **{f"dice_{name}": float(score) for name, score in zip(self.classes, dice, strict=True)}}
