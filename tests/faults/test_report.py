"""The fault page matches its JSON file, and no fault was lost."""

import ast
import json

from tests.faults.report import page
from tests.test_docs import REPOSITORY, RESULTS


def test_the_page_is_made_from_its_file():
    record = json.loads((RESULTS / "faults.json").read_text())
    assert (RESULTS / "faults.md").read_text() == page(record)
    assert record["faults"] and all(row["tried"] == row["survived"] > 0 for row in record["faults"])
    assert not record["environment"]["commit"].endswith("-dirty")


def test_the_file_has_a_row_for_every_fault():
    """Marks are read from the source, because most of the tests are not collected by default."""
    marked = set()
    for file in [*(REPOSITORY / "tests").rglob("test_*.py")]:
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            words = call.args[:2]  # what, how
            if ast.unparse(call.func) in ("pytest.mark.injects", "case") and isinstance(words[0], ast.Constant):
                marked.add(tuple(argument.value for argument in words))
    rows = {(row["fault"], row["how"]) for row in json.loads((RESULTS / "faults.json").read_text())["faults"]}
    assert len(marked) > 40 and marked <= rows, marked - rows
