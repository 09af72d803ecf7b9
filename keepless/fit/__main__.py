"""Find out which training step of a network fits on a device:

    python -m keepless.fit MODULE:FUNCTION --memory 12GiB --optimizer momentum --autocast bfloat16
    python -m keepless.fit MODULE:FUNCTION --memory 24GiB --grow batch --time 1.15

FUNCTION takes no arguments, and returns a network and an example of its input: a tensor, a tuple of arguments, or a
dictionary of keyword arguments. It is called under torch.device("meta"), where tensors have no values and take no
memory. If that fails, e.g. because it reads weights, it is called again without torch.device("meta").
"""

import argparse
import importlib
import logging
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .device import OPTIMIZERS
from .fit import Fit, fit, limits

_EXAMPLE = "give mine:step, with def step(): return resnet50(), torch.zeros(8, 3, 224, 224) in mine.py"


def main(given: list[str]) -> Fit:
    """Print what fits. ValueError: an argument is wrong, or nothing fits."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m keepless.fit", description=__doc__, formatter_class=raw)
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("--memory", required=True, help="memory of the device, such as 12GiB")
    names = ", ".join(OPTIMIZERS)
    parser.add_argument("--optimizer", default="adamw", help=f"{names}, or bytes of its states per weight (adamw)")
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="dtype of torch.autocast around the network"
    )
    parser.add_argument("--grow", choices=("batch", "size"), help="find the largest batch, or images or texts")
    parser.add_argument(
        "--time", type=float, help="with --grow: longest step within a budget, as a multiple of the baseline (1.15)"
    )
    options = parser.parse_args(given)
    of_step: dict[str, Any] = {"optimizer": options.optimizer, "grow": options.grow, "time": options.time}
    with suppress(ValueError):
        of_step["optimizer"] = float(options.optimizer)
    limits(options.memory, **of_step)  # raises before the network is made
    network, example = _made(options.function)
    device = next((parameter.device.type for parameter in network.parameters()), "cpu").replace("meta", "cpu")
    if options.grow:
        print(f"searching for the largest {options.grow}: minutes for a large network", file=sys.stderr)
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("keepless.fit").setLevel(logging.INFO)  # each way as it is found
    with torch.autocast(device, getattr(torch, options.autocast)) if options.autocast else nullcontext():
        try:
            found = fit(network, example, options.memory, **of_step)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise _in_a_line(error, f"a step of {options.function}'s network on its example") from error
    print(found)
    return found


def _in_a_line(error: Exception, what: str) -> ValueError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    about = str(error).strip().partition("\n")[0]
    return ValueError(f"{what} raises {type(error).__name__} ({Path(place.filename).name}:{place.lineno}): {about}")


def _made(name: str) -> tuple[nn.Module, Any]:
    """The result of MODULE:FUNCTION. ValueError: there is no such function, it fails, or it returns something else."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: {error}; expected MODULE:FUNCTION, found from this folder; {_EXAMPLE}") from error
    try:
        with torch.device("meta"):
            made = function()
    except Exception:  # raised by meta tensors where values are needed: RuntimeError, by NumPy TypeError
        try:
            made = function()
        except Exception as error:
            raise _in_a_line(error, name) from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        kinds = [type(one).__name__ for one in (made if isinstance(made, tuple) else [made])]
        raise ValueError(
            f"{name} returns {', '.join(kinds)}: expected a network (nn.Module), and an example of its input; "
            f"{_EXAMPLE}"
        )
    return made


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"python -m keepless.fit: {error}")
