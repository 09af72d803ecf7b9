"""The documentation agrees with the committed records, its links lead somewhere, and its training example works."""

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import documents, tables
from scripts.reports import papers

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "docs" / "results"
WRITE = "the page is not what its records give: python -m benchmarks.documents writes it again"
# They trace whole networks, or compose every experiment.
SLOW_BLOCKS = {"bodies", "recomputation", "printed", tables.LEFT_OUT, *papers.TABLES}


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.stem)
def test_every_marked_block_is_what_the_scripts_make_and_every_page_has_its_pictures(document):
    text = document.read_text()
    assert documents.updated(text, only=lambda name: name not in SLOW_BLOCKS) == text, WRITE
    drawn = set(re.findall(r"\(([\w/]+\.png)\)", text))
    missing = [file for file in drawn if not (document.parent / file).is_file()]
    assert not missing, f"{document.name} shows {missing}: add the files, or leave them out"
    if document.parent == RESULTS:  # and no picture is shown nowhere
        pictures = [*RESULTS.glob(f"{document.stem}*.png"), *(RESULTS / document.stem).glob("*.png")]
        shown = {file for page in documents.DOCUMENTS for file in re.findall(r"([\w/]+\.png)\)", page.read_text())}
        unused = {file.name for file in pictures} - {Path(file).name for file in shown}
        assert not unused, f"no page shows {unused}: show or delete them"


PAGES = [REPOSITORY / "README.md", REPOSITORY / "keepless" / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def commits_of(record: object) -> Iterator[str]:
    """All commits in a record, but not where the record says that its provenance is lost."""
    if isinstance(record, dict):
        if isinstance(record.get("commit"), str) and "provenance lost" not in record.get("provenance", ""):
            yield from record["commit"].split(", ")
        record = list(record.values())
    if isinstance(record, list):
        for child in record:
            yield from commits_of(child)


def test_every_record_is_of_a_clean_commit_of_the_history_or_says_that_it_is_lost():
    history = subprocess.run(["git", "rev-list", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
    if not history or (REPOSITORY / ".git" / "shallow").exists():
        pytest.skip("needs the whole history")
    short_hashes = {commit[:8] for commit in history}
    advice = "measure again from a clean commit, or say in its `provenance` that the provenance lost is this one's"
    for file in sorted(RESULTS.rglob("*.json")):
        for commit in commits_of(json.loads(file.read_text())):
            is_known = commit[:8] in short_hashes and "dirty" not in commit
            assert is_known, f"{file}: {commit} is no commit of the history: {advice}"


def test_results_are_small_and_each_record_has_a_page_and_is_no_rehearsal():
    pages, records = ({file.stem for file in RESULTS.glob(f"*.{suffix}")} for suffix in ("md", "json"))
    assert records <= pages, f"{records - pages}.json: write docs/results/NAME.md around its block, or delete it"
    size = sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file())
    assert size <= 3 * 10**6, f"docs/results has {size:,} bytes: delete records and pictures that newer ones replace"
    rehearsed = [name for name in records if '"rehearsal": true' in (RESULTS / f"{name}.json").read_text()]
    assert not rehearsed, f"{rehearsed}: measure again without rehearsal=true"


@pytest.mark.slow
def test_the_other_blocks_are_what_the_scripts_make_too():
    for document in documents.DOCUMENTS:
        text = document.read_text()
        assert documents.updated(text, only=SLOW_BLOCKS.__contains__) == text, f"{document.name}: {WRITE}"


def test_every_recorded_run_is_on_the_page_of_tables():
    """One of those with the same records is enough. What the page says of each, the slow test above holds."""
    text, folders = (RESULTS / "tables.md").read_text(), defaultdict[str, list[str]](list)
    for file in sorted(RESULTS.rglob("config.yaml")):
        folders[(file.parent / "metrics.jsonl").read_text()].append(str(file.parent.relative_to(RESULTS)))
    missing = [same for same in folders.values() if not any(re.search(rf"{folder}[:/]", text) for folder in same)]
    assert folders and not missing, f"tables.md names none of {missing}: {WRITE}"


def test_every_block_is_marked():
    marked = [name for path in documents.DOCUMENTS for name, *_ in documents.BLOCK.findall(path.read_text())]
    names = sorted(name for name in marked if name != documents.KEPT)
    expected = sorted(documents.BLOCKS.keys() - {documents.KEPT})
    advice = "mark each block of documents.BLOCKS once, by <!-- NAME start --> and <!-- NAME end -->, and no other"
    assert names == expected, f"{ {*names} ^ {*expected} or 'a block is marked twice' }: {advice}"
    assert papers.TABLES.keys() < {*marked}, f"{papers.TABLES.keys() - {*marked}}: mark them in docs/results/tables.md"


def test_a_block_is_made_again_whatever_its_numbers_were():
    """Otherwise the tests above could not fail."""

    def other_numbers(block: re.Match) -> str:
        return re.sub(r"(\| |-->)\d+\.\d+", r"\g<1>7.77", block[0]) if block[1] in from_records else block[0]

    from_records = {"steps", "reversible"}
    changed_blocks = set()
    for path in documents.DOCUMENTS:
        text = path.read_text()
        changed = documents.BLOCK.sub(other_numbers, text)
        blocks = zip(documents.BLOCK.findall(text), documents.BLOCK.findall(changed), strict=True)
        changed_blocks |= {before[0] for before, after in blocks if before != after}
        assert documents.updated(changed, only=from_records.__contains__) == text
    assert changed_blocks == from_records


def test_links_in_the_documentation_lead_somewhere():
    for page in [*(REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "keepless/CHANGELOG.md")), *PAGES]:
        for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if not target.startswith("http"):
                file = page.parent / target if target else page
                assert file.exists(), f"{page.name}: {target} does not exist: correct the link"
                assert not heading or heading in headings(file), f"{page.name}: {target} has no heading #{heading}"


def test_blocks_of_code_end_where_their_page_says():
    """Text after a closing fence would leave it open, and show what follows as code."""
    for page in [REPOSITORY / "CONTRIBUTING.md", *PAGES]:
        fences = re.findall(r"(?m)^ *```(.*)$", page.read_text())
        assert not any(fences[1::2]) and len(fences) % 2 == 0, f"{page.name}: end each block with a line of ``` alone"


def headings(page: Path) -> list[str]:
    """Return the headings of a page in the form that links use."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("name, most", [("README.md", 750), ("keepless/README.md", 600)])
def test_the_readmes_are_short(name, most):
    """Counts the words that a reader of the page sees, without code and pictures."""
    text = re.sub(r"(?s)```.*?```|!\[.*?\]\(.*?\)|<!--.*?-->", " ", (REPOSITORY / name).read_text())
    words = len(re.sub(r"\]\([^)]*\)|[|*#`\[\]→–]|(?<=\s)-+(?=\s)", " ", text).split())
    assert words <= most, f"{name} has {words} words, at most {most}: move sentences to a page of docs/"
