"""Overrides in messages can be pasted into a command."""

import shlex

import pytest

from engine.schema.keys import override
from tests.runs import composed

PATHS = (
    *("runs/lr=1,bs=2/last.pt", "a b/c", "Straße/街", "a'b\"c/d", "[x] {y} (z)/:w", "~/a", "${run_dir}/a", "a\\${b}"),
    *("back\\slash\\", "\\\\'\\\"", "null", "12", "1e3", "", " ", "/", "#", "$a/*?!;&|<>`", "a//b", "plain/net-1.pt"),
)


@pytest.mark.parametrize("path", PATHS)
def test_an_override_that_is_advised_reads_back_to_the_path(path):
    """Through a shell and Hydra."""
    (word,) = shlex.split(shlex.quote(override("checkpoint", path)))
    assert composed("eval", word).checkpoint == path
