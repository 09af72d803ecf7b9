"""What a DataLoader reads: random crops for training, whole images for evaluation. Pixels travel as uint8."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process, popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from datasets.reading import Window
from datasets.segmentation import SegmentationDataset
from datasets.transforms import TrainingTransform

MAX_SKIPPED = 8  # unreadable images in a row: beyond, it is not a damaged file but a missing disk

_KEPT_BLOCKS = 6  # of 16 MiB, four bytes a pixel


class Draw(NamedTuple):
    """One crop of a run: from `image`, in `epoch`, containing `pixel` (row, column) of class `class_id`.

    `place` is its number in the epoch, where an image may be drawn more than once.
    """

    epoch: int
    image: int
    place: int | None = None
    class_id: int | None = None
    pixel: tuple[int, int] | None = None


class TrainingCrops(Dataset):
    """Augmented crops, addressed as the samplers yield them: by (epoch, index), or by a `Draw`.

    A crop depends on the seed and its address only: not on the number of workers, nor on what was read before.
    `skip_unreadable`: where an image or label cannot be read, a crop of the next readable one takes its place, and says
    why; at most `MAX_SKIPPED` in a row.
    """

    def __init__(
        self, dataset: SegmentationDataset, transform: TrainingTransform, seed: int, skip_unreadable: bool = False
    ):
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self.skip_unreadable = skip_unreadable

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int] | Draw) -> dict:
        """{"image": uint8 tensor (3, h, w) RGB, "label": uint8 tensor (h, w) of train ids, "name": str, "skipped": str}

        "skipped" is empty, or a line for each file that could not be read and whose place this crop takes.
        """
        draw = Draw(*key)
        skipped: list[str] = []
        while True:
            try:
                return {**self._crop(draw), "skipped": "\n".join(skipped)}
            except ValueError as error:
                if not self.skip_unreadable:
                    raise
                if len(skipped) == MAX_SKIPPED:
                    raise ValueError(
                        f"data.on_error=skip: {MAX_SKIPPED + 1} images in a row cannot be read, as where a folder or a "
                        f"disk is lost; the last one: {error}"
                    ) from error
                skipped.append(" ".join(str(error).split()))
                draw = draw._replace(image=(draw.image + 1) % len(self), class_id=None, pixel=None)

    def _crop(self, draw: Draw) -> dict:
        index, rng = draw.image, self._rng(draw)
        size = self.dataset.size(index)
        image, label = (
            _Stored(size, partial(read, index)) for read in (self.dataset.read_image, self.dataset.read_label)
        )
        image, label = self.transform(image, label, rng, draw.pixel)
        return {
            "image": _channels_first(image),
            "label": torch.from_numpy(label),
            "name": self.dataset.files[index].name,
        }

    def geometry(self, key: tuple[int, int] | Draw) -> tuple[tuple[int, int], tuple[int, int], bool]:
        """Where a crop comes from, as `TrainingTransform.draw`: scaled size (H, W), place in it (top, left), flip."""
        draw = Draw(*key)
        return self.transform.draw(self.dataset.size(draw.image), self._rng(draw), draw.pixel)

    def _rng(self, draw: Draw) -> np.random.Generator:
        # Without a place, as for (epoch, index): an image that is drawn once in an epoch needs none.
        place = [] if draw.place is None else [draw.place]
        return np.random.default_rng([self.seed, draw.epoch, draw.image, *place])


@dataclass(frozen=True)
class _Stored:
    """A picture in a file, of which slicing decodes a window: all that a crop needs of an array."""

    shape: tuple[int, int]  # (H, W)
    read: Callable[[Window], np.ndarray]

    def __getitem__(self, window: Window) -> np.ndarray:
        return self.read(window)


class WholeImages(Dataset):
    """Images at full resolution with their labels, for evaluation and prediction. Sizes may differ: batches of one."""

    def __init__(self, dataset: SegmentationDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        """{"image": uint8 tensor (3, H, W) RGB, "label": uint8 tensor (H, W), "name": str, "index": int}.

        The label is in `ClassTable.scored_ids`. Where every image has instances there is "instances" too, int32 (H, W)
        as in `SegmentationDataset.scored`. There is no "label" where the split has none.
        """
        (image, label, name), instances = self.dataset.scored(index)
        item = {"image": _channels_first(image), "name": name, "index": index}
        if label is not None:
            item["label"] = torch.from_numpy(label)
        if instances is not None:
            item["instances"] = torch.from_numpy(instances)
        return item


class _Killed(popen_fork.Popen):
    """Ended by SIGKILL where Python and PyTorch, at the latest at the end of the process, send SIGTERM."""

    def terminate(self) -> None:
        # Meanwhile PyTorch's handler would take it for a worker that died.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.kill()
        self.wait()
        signal.signal(signal.SIGCHLD, handler)


class _Worker(ForkProcess):
    @staticmethod
    def _Popen(process: ForkProcess) -> _Killed:
        return _Killed(process)


class Workers(ForkContext):
    """`multiprocessing_context` of a DataLoader with `worker_init`."""

    Process = _Worker


def worker_init(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader."""
    # Schedulers and torchrun send them to the whole process group, and a terminal Ctrl-C. They are meant for the run,
    # which reads on to the end of its step and stops its workers itself.
    if parent_process() is not None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    cv2.setNumThreads(0)  # OpenCV's own threads would compete with the other workers
    # Pillow keeps what one image of 25 megapixels needs for the next one: taking the pages of a large image from the
    # system each time can take as long as decoding it. (Private, but the only way besides environment variables.)
    Image.core.set_blocks_max(_KEPT_BLOCKS)


@contextmanager
def worker_failures(
    workers: int, timeout_seconds: int, keys: str = "data.", advice: str = " resume=auto continues the run"
) -> Iterator[None]:
    """Around what reads with `workers` processes: an error of PyTorch about them becomes one that says what to do.

    `keys`: what precedes workers and timeout_seconds in the names of their keys. `advice`: the last sentence.

    Raises:
        TimeoutError: they brought nothing for `timeout_seconds`.
        ChildProcessError: one of them was killed.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise TimeoutError(
                f"the {keys}workers={workers} processes that read images brought none for {keys}timeout_seconds="
                f"{timeout_seconds} seconds: a disk or network folder may hang, or reading is that slow (then raise "
                f"{keys}timeout_seconds); {keys}workers=0 reads without them.{advice}"
            ) from error
        if str(error).startswith("DataLoader worker"):
            raise ChildProcessError(
                f"one of the {keys}workers={workers} processes that read images ended: {str(error).strip()} Where the "
                f"machine ran out of memory, fewer {keys}workers need less.{advice}"
            ) from error
        raise


def _channels_first(image: np.ndarray) -> torch.Tensor:
    planes = np.empty((3, *image.shape[:2]), np.uint8)
    cv2.split(image, list(planes))  # several times faster than numpy's copy of the transposed array
    return torch.from_numpy(planes)
