"""Checkpoints of earlier versions in the present format. (Keys younger than a checkpoint get their defaults in
`config.from_plain`; scripts.predict takes colours, which the oldest ones lack, from the data.)"""

from torch import Tensor

FORMAT = "inplace-abn/2"
SEGMENTATION_ONLY = "inplace-abn-segmentation/1"  # train_seg.py wrote it before there were tasks


def migrated(state: object) -> object:
    """`state`, read from a file, in the present format if it is of an earlier one; otherwise unchanged.

    What is malformed stays as it is, for `checkpoint.checked` to refuse.
    """
    if not isinstance(state, dict) or state.get("format") != SEGMENTATION_ONLY:
        return state
    state = {"skipped_images": 0, **state, "format": FORMAT, "task": "segmentation"}
    if isinstance(state.get("config"), dict):  # before there were samplers
        state["config"] = {"sampler": {"name": "uniform"}, **state["config"]}
    random = state.get("random")
    if isinstance(random, dict) and isinstance(random.get("cpu"), Tensor):
        # Before there were ranks: one process, with the states of all its devices.
        cuda = random.get("cuda")
        state["random"] = {"cpu": [random["cpu"]], "cuda": cuda[:1] if isinstance(cuda, list) else []}
    return state
