"""Every strategy of the layers: what it keeps for the backward pass, and how it recovers the rest."""

from functools import partial

from keepless import ABN, CheckpointedABN, InPlaceABN

STRATEGIES = {
    "std": ABN,
    "checkpoint": partial(CheckpointedABN, store="x"),
    "checkpoint_xhat": partial(CheckpointedABN, store="x_hat"),
    "inplace_1": partial(InPlaceABN, variant="I"),
    "inplace": InPlaceABN,
}
OVERWRITING = {
    "inplace_1_overwrite": partial(InPlaceABN, variant="I", overwrite_input=True),
    "inplace_overwrite": partial(InPlaceABN, overwrite_input=True),
}
CHECKPOINTED = ["checkpoint", "checkpoint_xhat"]
IN_PLACE = ["inplace_1", "inplace"]
