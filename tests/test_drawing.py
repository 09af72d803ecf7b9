"""What `make test` draws: a part of each table and few slow tests, the same for all workers."""

from pathlib import Path

import pytest

from tests import conftest


class Item:
    def __init__(self, nodeid: str, *marks: pytest.Mark):
        self.nodeid, self.path, self.marks = nodeid, Path(nodeid.partition(":")[0]), [*marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name: str) -> None:
        self.marks.append(getattr(pytest.mark, name).mark)


def drawn(monkeypatch: pytest.MonkeyPatch, word: str, *further: Item) -> set[str]:
    slow, table = pytest.mark.slow.mark, pytest.mark.table.mark
    items = [Item(f"a.py::table[{number}]", table, *[slow] * (number > 19)) for number in range(24)]
    items += [Item("a.py::one"), *(Item(f"a.py::slow{number % 9}[{number}]", slow) for number in range(99)), *further]
    monkeypatch.setenv("DRAW", word)
    conftest.pytest_collection_modifyitems(items)
    return {item.nodeid for item in items if item.get_closest_marker("drawn")}


def test_a_draw_is_of_its_word_and_has_a_part_of_each_kind(monkeypatch):
    never = [Item(f"b.py::{name}", getattr(pytest.mark, name).mark) for name in ("gpu", "peer")]
    never.append(Item("b.py::minutes", pytest.mark.slow("minutes").mark))
    first, again, second = (drawn(monkeypatch, word, *never) for word in ("first", "first", "other"))
    assert first == again != second and "a.py::one" in first & second
    assert len(first) == len(second) == 1 + 4 + conftest.DRAWN_SLOW and not first & {item.nodeid for item in never}
    alone = drawn(monkeypatch, "first")  # all in one file
    assert alone == {"a.py::one", *(f"a.py::table[{number}]" for number in range(20))}
    often = set.union(*(drawn(monkeypatch, str(number), *never) for number in range(500)))
    assert len(often) == 1 + 24 + 99  # in time each test
