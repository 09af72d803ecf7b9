"""What commands share: MODULE:FUNCTION, which makes a network and an example, and errors in a line."""

import importlib
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

_EXAMPLE = "give mine:step, with def step(): return resnet50(), torch.zeros(8, 3, 224, 224) in mine.py"


def parser_of(name: str, description: str | None) -> ArgumentParser:
    """A parser of MODULE:FUNCTION and --autocast. `name`: of the module that is run."""
    parser = ArgumentParser(f"python -m {name}", description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    dtypes = ("bfloat16", "float16")
    parser.add_argument("--autocast", choices=dtypes, help="dtype of torch.autocast around the network")
    return parser


def autocast(device: str, dtype: str | None) -> AbstractContextManager[Any]:
    """The context that --autocast asks for. `device`: a type of devices, such as "cuda"."""
    return torch.autocast(device, getattr(torch, dtype)) if dtype else nullcontext()


def network_and_example(name: str, on_meta: bool = False) -> tuple[nn.Module, Any]:
    """The result of MODULE:FUNCTION. ValueError: there is no such function, it fails, or it returns something else.

    `on_meta`: it is called under torch.device("meta"), and without if that fails.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: {error}; expected MODULE:FUNCTION, found from this folder; {_EXAMPLE}") from error
    returned: Any = None
    try:
        with torch.device("meta") if on_meta else nullcontext():
            returned = function()
    except Exception as error:  # the user's code may raise anything, and meta tensors do where values are needed
        if on_meta:
            return network_and_example(name)
        raise one_line_error(error, name) from error
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], nn.Module):
        values = returned if isinstance(returned, tuple) else (returned,)
        kinds = [type(value).__name__ for value in values]
        raise ValueError(
            f"{name} returns {', '.join(kinds)}: expected a network (nn.Module), and an example of its input; "
            f"{_EXAMPLE}"
        )
    return returned


def one_line_error(error: Exception, subject: str) -> ValueError:
    """An error of the user's code as a message in one line: "SUBJECT raises …"."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().partition("\n")[0]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return ValueError(f"{subject} raises {type(error).__name__} ({place}): {message}")


def run_command(main: Callable[[list[str]], object], name: str) -> None:
    """Run a command's `main`. A ValueError ends it as a message; otherwise its status is 1 if `main` returns False."""
    try:
        sys.exit(main(sys.argv[1:]) is False)
    except ValueError as error:
        sys.exit(f"python -m {name}: {error}")
