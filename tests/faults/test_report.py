"""No fault was lost, and the record has a row for every fault that a test injects."""

import ast
import json

from tests.test_docs import REPOSITORY, RESULTS


def test_the_record_has_a_row_for_every_fault_and_all_survived():
    """Marks are read from the source, because most of the tests are not collected by default."""
    record = json.loads((RESULTS / "faults.json").read_text())
    assert record["faults"] and all(row["tried"] == row["survived"] > 0 for row in record["faults"])
    assert not record["environment"]["commit"].endswith("-dirty")
    marked = set()
    for file in [*(REPOSITORY / "tests").rglob("test_*.py")]:
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            words = call.args[:2]  # what, how
            if ast.unparse(call.func) in ("pytest.mark.injects", "case") and isinstance(words[0], ast.Constant):
                marked.add(tuple(argument.value for argument in words))
    rows = {(row["fault"], row["how"]) for row in record["faults"]}
    assert len(marked) > 40 and marked == rows, marked ^ rows
