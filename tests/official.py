"""The official Cityscapes evaluation, run on files."""

from pathlib import Path

import numpy as np
import pytest

from datasets import SegmentationDataset


def cityscapes_script(dataset: SegmentationDataset, predictions: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run `evalPixelLevelSemanticLabeling` on a folder of predictions; with iIoU if the dataset has instances."""
    script = pytest.importorskip("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    # It calls np.in1d, which numpy 2.4 removed; np.isin is its documented replacement for flattened arguments.
    monkeypatch.setattr(np, "in1d", lambda a, b: np.isin(np.ravel(a), b), raising=False)
    for option, value in {"evalInstLevelScore": dataset.has_instances, "JSONOutput": False, "quiet": True}.items():
        monkeypatch.setattr(script.args, option, value)
    files = [str(predictions / f"{entry.name}.png") for entry in dataset.files]
    return script.evaluateImgLists(files, [str(entry.label) for entry in dataset.files], script.args)
