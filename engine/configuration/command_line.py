"""Command-line entry points: configuration, --help, exit statuses and error messages."""

import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from engine import sweep
from engine.configuration.arguments import check_arguments, chosen
from engine.configuration.choices import CONFIGS, groups_in
from engine.configuration.config import register
from engine.configuration.help import help_text
from engine.configuration.texts import as_typed
from engine.console import logger, make_printing_safe
from engine.distributed import launched, world_size
from engine.memory import is_out_of_memory
from engine.schema.keys import Keys
from engine.stopping import EXIT_CODE, Preempted

# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def declare(name: str, schema: type) -> None:
    """Make a command known to Hydra as command/NAME.

    Hydra writes no logs and makes no folders (see engine/checkpoint/run_directory.py).
    """
    register(name, schema)
    defaults = f"/{name}" if groups_in(name) else f"/schema/{name}"
    node = {
        "defaults": [defaults, "_self_", *({f"override /hydra/{log}_logging": "none"} for log in ("job", "hydra"))],
        "hydra": {"run": {"dir": "."}, "output_subdir": None},
    }
    ConfigStore.instance().store(group="command", name=name, node=node, package="_global_")


def configured(
    name: str, schema: type, about: str | None = None
) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Decorator: makes `main(values)` a command that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help starts with
    `about`, by default the docstring of main's module. Errors: see `check_arguments`, `errors_for_users`.
    """

    def decorated(main: Callable[[DictConfig], object]) -> Callable[[], None]:
        declare(name, schema)
        compose = partial(composed, name)

        @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=f"command/{name}")
        @wraps(main)
        def run(values: DictConfig) -> None:
            with errors_for_users():
                (record(main) if launched() else main)(values)  # `record` leaves the error for torchrun to print

        def checked_job(words: list[str]) -> Keys:
            config = check_arguments(name, words, schema, compose)
            assert config is not None, "a job of a sweep has key=value arguments alone"
            return config

        @wraps(run)
        def checked() -> None:
            sweeps = not {*sweep.FLAGS}.isdisjoint(sys.argv)
            sys.argv[1:] = arguments = [as_typed(word, schema, sweeps) for word in sys.argv[1:]]
            text = about or sys.modules[main.__module__].__doc__ or name
            with errors_for_users():
                if not {"--help", "-h"}.isdisjoint(arguments):
                    print(help_text(text, name, schema, chosen(name, arguments, schema, compose)))
                    return
                check_arguments(name, arguments, schema, compose)
                if sweeps:
                    has_run_dir = any(entry.name == "run_dir" for entry in fields(schema))
                    sweep.run(arguments, checked_job, has_run_dir)
                    return
            run()

        return checked

    return decorated


def composed(name: str, *overrides: str) -> DictConfig:
    """Compose the configuration of a declared command with `overrides`, also while another command runs."""
    schema = OmegaConf.get_type(ConfigStore.instance().load(f"schema/{name}.yaml").node)
    assert schema is not None, name
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(f"command/{name}", [as_typed(word, schema) for word in overrides])
    finally:
        GlobalHydra.instance().hydra = running


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C while Python exits: it would only print a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def errors_for_users() -> Iterator[None]:
    """Wraps a command: errors that its user can fix become a message and exit status 1; others keep their traceback.

    HYDRA_FULL_ERROR=1 keeps all tracebacks.
    """
    make_printing_safe()
    # Its warning that no CUDA runtime is found means only that code is compiled for the CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        yield
    except KeyboardInterrupt:
        _ignore_interrupts()
        sys.exit("interrupted")
    except Preempted as stopped:
        _ignore_interrupts()
        logger.info(f"{stopped}; exit status {EXIT_CODE}: start it again with resume=auto")
        sys.exit(EXIT_CODE)
    except Exception as error:  # out-of-memory errors of OpenCV and PyTorch have any type
        for_users = isinstance(error, (ValueError, FloatingPointError, MemoryError, OSError)) and bool(str(error))
        out_of_memory = not for_users and is_out_of_memory(error)
        if not out_of_memory and (not for_users or os.environ.get("HYDRA_FULL_ERROR") == "1"):
            raise
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        if out_of_memory:
            what = next(iter(str(error).strip().splitlines()), "the system gives no more")
            sys.exit(
                f"error: out of memory outside of steps and images: {what}. The network and its optimiser alone need "
                f"more than is free: stop other processes, raise ulimit -v if it is set, or use a smaller body"
            )
        # DataLoader workers put the original message at the end of a traceback.
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1]
        message = f"error: {message.strip()}"
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints this file: replace the text of `record`
            about = {"py_callstack": message, "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"extraInfo": about}}))
        sys.exit(message)
