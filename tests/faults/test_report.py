"""The page of the fault suite is that of its file, and nothing in it was lost."""

import json

from tests.faults.report import page
from tests.test_docs import RESULTS


def test_the_page_is_made_from_its_file():
    record = json.loads((RESULTS / "faults.json").read_text())
    assert (RESULTS / "faults.md").read_text() == page(record)
    assert record["faults"] and all(row["tried"] == row["survived"] > 0 for row in record["faults"])
