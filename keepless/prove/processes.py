"""A proof whose baseline and prepared steps run in a process each, so that none sees what another has left behind."""

import random
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..commands import autocast, network_and_example, one_line_error
from ..recompute.signatures.plans import Budget, arguments_of
from ..torch_internals import tree_map
from .proof import Proof, Steps, proof_of
from .prove import run_baseline_steps, run_prepared_steps


def proof_in_processes(name: str, budget: Budget, dtype: str | None) -> Proof:
    """The proof of MODULE:FUNCTION's network. `dtype`: of autocast. ValueError: its code raises an error."""
    with TemporaryDirectory() as folder:

        def steps_in_process(within: Budget | None) -> Steps:
            file = Path(folder) / "steps.pt"
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    process.submit(_write_steps, name, within, dtype, file).result()
            except BrokenProcessPool as error:
                text = "was killed, perhaps as memory ran out: give a smaller example"
                raise ValueError(f"a process that runs steps of {name}'s network {text}") from error
            return Steps(*torch.load(file, weights_only=False))

        return proof_of(steps_in_process(None), steps_in_process(None), steps_in_process(budget), budget)


def _write_steps(name: str, budget: Budget | None, dtype: str | None, file: Path) -> None:
    """Run steps, within a budget or of the baseline, and write them to a file as `Steps`."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    network, example = network_and_example(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        inputs = tree_map(lambda leaf: _on_device(device, leaf), arguments_of(example))
        network = network.to(device).train()
        with autocast(device, dtype):
            if budget is None:
                steps = run_baseline_steps(network, inputs)
            else:
                steps = run_prepared_steps(network, inputs, budget)
    except Exception as error:  # a network may raise anything
        raise one_line_error(error, f"a {'step' if budget is None else 'prepared step'} of {name}'s network") from None
    torch.save(tuple(steps), file)


def _on_device(device: str, leaf: Any) -> Any:
    """An argument on a device. Random numbers stand for zeros, of which most gradients would be zero."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().to(device)
    return torch.randn_like(leaf) if leaf.is_floating_point() and not leaf.any() else leaf
