"""Convert checkpoints of earlier versions to the current format.

Keys newer than a checkpoint get their defaults in `config.from_plain`, or here if the default is not what the run
did. The oldest checkpoints have no colours: scripts.predict takes them from the data.
"""

from torch import Tensor

from engine.console import logger

FORMAT = "inplace-abn/2"
SEGMENTATION_ONLY = "inplace-abn-segmentation/1"  # train_seg.py wrote it before there were tasks


def migrated(state: object) -> object:
    """Convert `state`, read from a file, to the current format; malformed content is left to `checkpoint.checked`."""
    if not isinstance(state, dict):
        return state
    if state.get("format") == SEGMENTATION_ONLY:
        state = _with_task(state)
    config = state.get("config")
    if not isinstance(config, dict):
        return state
    data, trainer, optim = (config.get(group) for group in ("data", "trainer", "optim"))
    groups: dict[str, dict] = {}
    if state.get("task") == "segmentation" and isinstance(data, dict):
        # Images that shrank were not smoothed before there was a key for it.
        groups["data"] = {"antialias": False, **data}
    if isinstance(trainer, dict) and trainer.get("recompute") == "selective":
        # It kept more than `activations`, which a compiled training does not have.
        recompute = "blocks" if trainer.get("compile") else "activations"
        logger.info(f"recompute=selective is gone: read as recompute={recompute}")
        groups["trainer"] = {**trainer, "recompute": recompute}
    if isinstance(optim, dict) and "lr_schedule" not in config:
        # SGD with the poly schedule was the only choice, and its power a key of the optimiser.
        groups["optim"] = {"name": "sgd", **{key: value for key, value in optim.items() if key != "power"}}
        groups["lr_schedule"] = {"name": "poly", "power": optim.get("power", 0.9)}
    return {**state, "config": {**config, **groups}} if groups else state


def _with_task(state: dict) -> dict:
    state = {"skipped_images": 0, **state, "format": FORMAT, "task": "segmentation"}
    if isinstance(state.get("config"), dict):  # older than samplers
        state["config"] = {"sampler": {"name": "uniform"}, **state["config"]}
    random = state.get("random")
    if isinstance(random, dict) and isinstance(random.get("cpu"), Tensor):
        # Older than ranks: one process, with the states of all its devices.
        cuda = random.get("cuda")
        state["random"] = {"cpu": [random["cpu"]], "cuda": cuda[:1] if isinstance(cuda, list) else []}
    return state
