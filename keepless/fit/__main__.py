"""Find out which training step of a network fits on a device:

    python -m keepless.fit MODULE:FUNCTION --memory 12GiB --optimizer momentum --autocast bfloat16
    python -m keepless.fit MODULE:FUNCTION --memory 24GiB --grow batch --time 1.15

FUNCTION takes no arguments, and returns a network and an example of its input: a tensor, a tuple of arguments, or a
dictionary of keyword arguments. It is called under torch.device("meta"), where tensors have no values and take no
memory. If that fails, e.g. because it reads weights, it is called again without torch.device("meta").
"""

import logging
import sys
from contextlib import suppress
from typing import Any

from ..commands import autocast, network_and_example, one_line_error, parser_of, run_command
from .device import OPTIMIZERS
from .fit import Fit, fit, limits


def main(arguments: list[str]) -> Fit:
    """Print what fits. ValueError: an argument is wrong, or nothing fits."""
    parser = parser_of("keepless.fit", __doc__)
    parser.add_argument("--memory", required=True, help="memory of the device, such as 12GiB")
    names = ", ".join(OPTIMIZERS)
    parser.add_argument("--optimizer", default="adamw", help=f"{names}, or bytes of its states per weight (adamw)")
    parser.add_argument("--grow", choices=("batch", "size"), help="find the largest batch, or images or texts")
    parser.add_argument(
        "--time", type=float, help="with --grow: longest step within a budget, as a multiple of the baseline (1.15)"
    )
    options = parser.parse_args(arguments)
    step_options: dict[str, Any] = {"optimizer": options.optimizer, "grow": options.grow, "time": options.time}
    with suppress(ValueError):
        step_options["optimizer"] = float(options.optimizer)
    limits(options.memory, **step_options)  # raises before the network is made
    network, example = network_and_example(options.function, on_meta=True)
    device = next((parameter.device.type for parameter in network.parameters()), "cpu").replace("meta", "cpu")
    if options.grow:
        print(f"searching for the largest {options.grow}: minutes for a large network", file=sys.stderr)
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("keepless.fit").setLevel(logging.INFO)  # each way as it is found
    with autocast(device, options.autocast):
        try:
            fitted = fit(network, example, options.memory, **step_options)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise one_line_error(error, f"a step of {options.function}'s network on its example") from error
    print(fitted)
    return fitted


if __name__ == "__main__":
    run_command(main, "keepless.fit")
