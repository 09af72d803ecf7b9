"""Errors that a user can fix are one message; others keep their traceback."""

import pytest
import torch

from datasets.class_table import UnknownIds
from engine.command_line import errors_for_users


def test_memory_that_runs_out_anywhere_is_a_message():
    with pytest.raises(SystemExit, match="error: out of memory outside of steps and images: .*smaller body"):
        with errors_for_users():
            torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), errors_for_users():
        raise RuntimeError("another one")


def test_users_see_the_message_of_a_worker_and_no_traceback(capsys):
    for kind, name in ((ValueError, "ValueError"), (UnknownIds, "datasets.class_table.UnknownIds")):
        caught = f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback\n  File"
        with pytest.raises(SystemExit) as exit_, errors_for_users():
            raise kind(f"{caught}\n{name}: a.png: is bad")
        assert exit_.value.code == "error: a.png: is bad"
    with pytest.raises(KeyError), errors_for_users():
        raise KeyError("our own mistake")
