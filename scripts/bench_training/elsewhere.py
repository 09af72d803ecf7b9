"""Objects in processes of their own, so that what they set for the whole process stays there."""

import multiprocessing
from collections.abc import Callable


class Elsewhere:
    """`make(*arguments)` in a new process; `call` calls a method there. A context manager: the process ends with it.

    `make` is found by its name, so it stands at the top of a module. What is raised there is raised by `call`.
    """

    def __init__(self, make: Callable, *arguments):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is seen here

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()

    def call(self, method: str, *arguments):
        """The result. Raises what the method, or making the object, raised; RuntimeError for a process that ended."""
        try:
            self.connection.send((method, arguments))
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise RuntimeError(f"the process ended with exit code {self.process.exitcode}") from error
        if isinstance(result, Exception):
            raise result
        return result


def _serve(connection, make: Callable, arguments: tuple) -> None:
    try:
        made = make(*arguments)
    except Exception as error:
        connection.recv()
        connection.send(error)
        return
    while True:
        method, arguments = connection.recv()
        try:
            connection.send(getattr(made, method)(*arguments))
        except Exception as error:  # the other process judges it
            connection.send(error)
