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
    if state.get("task") == "segmentation":
        state = _with_antialias(state)
    return _with_lr_schedule(_without_selective(state))


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


def _with_lr_schedule(state: dict) -> dict:
    """SGD with the poly schedule was the only choice, and its power a key of the optimiser."""
    config = state.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("optim"), dict) or "lr_schedule" in config:
        return state
    power = config["optim"].get("power", 0.9)
    optim = {"name": "sgd", **{key: value for key, value in config["optim"].items() if key != "power"}}
    return {**state, "config": {**config, "optim": optim, "lr_schedule": {"name": "poly", "power": power}}}


def _with_antialias(state: dict) -> dict:
    """Images that shrank were not smoothed before there was a key for it."""
    config = state.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("data"), dict):
        return state
    return {**state, "config": {**config, "data": {"antialias": False, **config["data"]}}}


def _without_selective(state: dict) -> dict:
    """`selective` kept more than `activations`, which a compiled training does not have."""
    config = state.get("config")
    if not isinstance(config, dict) or not isinstance(trainer := config.get("trainer"), dict):
        return state
    if trainer.get("recompute") != "selective":
        return state
    recompute = "blocks" if trainer.get("compile") else "activations"
    logger.info(f"recompute=selective is gone: read as recompute={recompute}")
    return {**state, "config": {**config, "trainer": {**trainer, "recompute": recompute}}}
