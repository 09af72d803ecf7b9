"""Running a command for its user: exit statuses and error messages."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

from engine.console import logger
from engine.distributed import launched
from engine.out_of_memory import is_out_of_memory
from engine.stopping import EXIT_CODE, Preempted


def train_from_command_line(train: Callable[[DictConfig, str], object], values: DictConfig) -> None:
    """Call `train(values, command)` with the command line of this process; errors: see `errors_for_users`."""
    train = record(train) if launched() else train  # torchrun prints the error that `record` leaves it
    with errors_for_users():
        train(values, command=shlex.join(["python", *sys.argv]))


@contextmanager
def errors_for_users() -> Iterator[None]:
    """Wraps a command: errors that its user can fix become a message and exit status 1; others keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        sys.exit(f"interrupted; {interrupt}" if str(interrupt) else "interrupted")
    except Preempted as stopped:
        logger.info(f"{stopped}; exit status {EXIT_CODE}: start it again with resume=auto")
        sys.exit(EXIT_CODE)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.debug("", exc_info=True)
        sys.exit(
            f"error: out of memory outside of steps and images: {str(error).strip().splitlines()[0]}. Network and "
            f"optimiser alone need more than is free: look for other processes there, or use a smaller body"
        )
    except (ValueError, FloatingPointError, MemoryError, OSError) as error:
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        # A DataLoader's worker wraps an error's message into a traceback of its own.
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1]
        sys.exit(f"error: {message.strip()}")
