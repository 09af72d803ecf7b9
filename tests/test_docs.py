"""The documentation agrees with the committed records, its links lead somewhere, and its training example works."""

import json
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import documents, steps, tables
from benchmarks.rows import ratio_of
from benchmarks.steps import DEFAULT, GROUPS
from scripts.reports import papers
from tests.test_structure import built_by

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "docs" / "results"
CPU_PARTS = ("switches", "norms", "allocation", "recompute", "compile")  # of GROUPS; others are for GPUs
ROOMS = ("engine", "models", "keepless", "datasets", "scripts", "benchmarks", "tools")
# They trace whole networks, or compose every experiment; test_tables.py makes one of these tables.
WRITE = "the page is not what its records give: python -m benchmarks.documents writes it again"
SLOW_BLOCKS = {"bodies", "recomputation", "printed", tables.LEFT_OUT, *papers.TABLES}


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.stem)
def test_every_marked_block_is_what_the_scripts_make_and_every_page_has_its_pictures(document):
    text = document.read_text()
    assert documents.written(text, only=lambda name: name not in SLOW_BLOCKS) == text, WRITE
    drawn = set(re.findall(r"\(([\w/]+\.png)\)", text))
    missing = [file for file in drawn if not (document.parent / file).is_file()]
    assert not missing, f"{document.name} shows {missing}: add the files, or leave them out"
    if document.parent == RESULTS:  # and no picture is shown nowhere
        own = [*RESULTS.glob(f"{document.stem}*.png"), *(RESULTS / document.stem).glob("*.png")]
        shown = {file for page in documents.DOCUMENTS for file in re.findall(r"([\w/]+\.png)\)", page.read_text())}
        unused = {file.name for file in own} - {Path(file).name for file in shown}
        assert not unused, f"no page shows {unused}: show or delete them"


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def commits_of(record: object) -> Iterator[str]:
    """All commits in a record, but not where the record says that its provenance is lost."""
    if isinstance(record, dict):
        if isinstance(record.get("commit"), str) and "provenance lost" not in record.get("provenance", ""):
            yield from record["commit"].split(", ")
        record = list(record.values())
    if isinstance(record, list):
        for each in record:
            yield from commits_of(each)


def test_every_record_is_of_a_clean_commit_of_the_history_or_says_that_it_is_lost():
    history = subprocess.run(["git", "rev-list", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
    if not history or (REPOSITORY / ".git" / "shallow").exists():
        pytest.skip("needs the whole history")
    known = {commit[:8] for commit in history}
    for file in sorted(RESULTS.rglob("*.json")):
        for commit in commits_of(json.loads(file.read_text())):
            is_known = commit[:8] in known and "dirty" not in commit
            advice = (
                "measure again from a clean commit, or say in its `provenance` that the provenance lost is this one's"
            )
            assert is_known, f"{file}: {commit} is no commit of the history: {advice}"


def test_results_are_few_pages_and_small():
    """Each record has a page, and no record is a rehearsal."""
    pages, records = ({file.stem for file in RESULTS.glob(f"*.{suffix}")} for suffix in ("md", "json"))
    assert len(pages) <= 10, (
        f"{len(pages)} pages: add to the page that answers the same question, or delete an answered one"
    )
    assert records <= pages, (
        f"{records - pages}.json: write docs/results/NAME.md around its block, or delete the record"
    )
    size = sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file())
    assert size <= 3 * 10**6, f"docs/results has {size:,} bytes: delete records and pictures that newer ones replace"
    rehearsed = [name for name in records if '"rehearsal": true' in (RESULTS / f"{name}.json").read_text()]
    assert not rehearsed, f"{rehearsed}: measure again without rehearsal=true"


def test_the_loops_overhead_is_in_its_record():
    rows = json.loads((RESULTS / "steps" / "overhead.json").read_text())["rows"]
    times = {row["loop"]: row["times_ms"] for row in rows}
    median, bare = ratio_of(times["real"], times["bare"]), statistics.median(times["bare"])
    said = f"{median:.3f} of the time of a bare step of {bare:.0f} ms"
    assert said in (RESULTS / "steps.md").read_text(), f"docs/results/steps.md: say {said!r}, as overhead.json has it"


@pytest.mark.slow
def test_the_other_blocks_are_what_the_scripts_make_too():
    for document in documents.DOCUMENTS:
        text = document.read_text()
        assert documents.written(text, only=SLOW_BLOCKS.__contains__) == text, f"{document.name}: {WRITE}"


def test_every_recorded_run_is_on_the_page_of_tables():
    """One of those with the same records is enough. What the page says of each, the slow test above holds."""
    text, folders = (RESULTS / "tables.md").read_text(), defaultdict[str, list[str]](list)
    for file in sorted(RESULTS.rglob("config.yaml")):
        folders[(file.parent / "metrics.jsonl").read_text()].append(str(file.parent.relative_to(RESULTS)))
    missing = [same for same in folders.values() if not any(re.search(rf"{folder}[:/]", text) for folder in same)]
    assert folders and not missing, f"tables.md names none of {missing}: {WRITE}"


def test_every_block_is_marked_and_every_switch_is_measured():
    marked = [name for path in documents.DOCUMENTS for name, *_ in documents.BLOCK.findall(path.read_text())]
    written = sorted(name for name in marked if name != documents.KEPT)
    expected = sorted(documents.BLOCKS.keys() - {documents.KEPT})
    advice = "mark each block of documents.BLOCKS once, by <!-- NAME start --> and <!-- NAME end -->, and no other"
    assert written == expected, f"{ {*written} ^ {*expected} or 'a block is marked twice' }: {advice}"
    assert papers.TABLES.keys() < {*marked}, f"{papers.TABLES.keys() - {*marked}}: mark them in docs/results/tables.md"
    calls = json.loads((RESULTS / "steps.json").read_text())["calls"]
    known = {each for own in GROUPS.values() for each in own}
    on_cpus = {each for part in CPU_PARTS for each in GROUPS[part]}
    measured = {name for call in calls for name in steps.switches_of(call)}
    assert on_cpus <= measured, f"{on_cpus - measured}: measure them (benchmarks.steps), or take them out of GROUPS"
    assert measured <= known, f"{measured - known}: name them in GROUPS of benchmarks/steps.py, or drop the call"
    assert DEFAULT in on_cpus, f"GROUPS lacks {DEFAULT!r}, with which the others are compared"
    recomputed = next(steps.switches_of(call) for call in calls if call["arguments"]["parts"] == ["recompute"])
    ours, default = (recomputed[name][0]["saved_bytes"] for name in ("norm=std trainer.recompute=activations", DEFAULT))
    assert abs(ours / default - 1) < 0.02, (
        "docs/training.md says that both need the same memory: correct it, or the code"
    )


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
        assert documents.written(changed, only=from_records.__contains__) == text
    assert changed_blocks == from_records


def test_links_in_the_documentation_lead_somewhere():
    for page in [*(REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "keepless/CHANGELOG.md")), *PAGES]:
        for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if not target.startswith("http"):
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name}: {target} does not exist: correct the link"
                assert not heading or heading in headings(there), f"{page.name}: {target} has no heading #{heading}"


def test_blocks_of_code_end_where_their_page_says():
    """Text after a closing fence would leave it open, and show what follows as code."""
    for page in [REPOSITORY / "CONTRIBUTING.md", *PAGES]:
        fences = re.findall(r"(?m)^ *```(.*)$", page.read_text())
        assert not any(fences[1::2]) and len(fences) % 2 == 0, f"{page.name}: end each block with a line of ``` alone"


def headings(page: Path) -> list[str]:
    """Return the headings of a page in the form that links use."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_map_of_the_code_names_every_file():
    """But for what choices build: the class says what it is, and where."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    named = {*re.findall(r"\w+", text[text.index("## Map of the code") : text.index("Where a change starts")])}
    files = [file for folder in ROOMS for file in sorted((REPOSITORY / folder).rglob("*.py")) if file.stem[:2] != "__"]
    built = {name.rpartition(".")[0] for file in (REPOSITORY / "engine/schema").glob("*.py") for name in built_by(file)}
    unnamed = [file.relative_to(REPOSITORY) for file in files if file.stem not in named]
    missing = [str(file) for file in unnamed if ".".join(file.with_suffix("").parts) not in built]
    assert not missing, f"{missing}: say in CONTRIBUTING.md, 'Map of the code', what each is for"


def visible(text: str) -> str:
    """The words that a reader of the page sees, without code and pictures."""
    text = re.sub(r"(?s)```.*?```|!\[.*?\]\(.*?\)|<!--.*?-->", " ", text)
    return re.sub(r"\]\([^)]*\)|[|*#`\[\]→–]|(?<=\s)-+(?=\s)", " ", text)


def test_the_readme_reads_as_prose():
    """READMEs that are easy to read have fewer brackets and longer clauses. Tables do not count as clauses."""
    text = (REPOSITORY / "README.md").read_text()
    words, prose = len(visible(text).split()), visible(re.sub(r"(?m)^\|.*$", "", text))
    assert words <= 900, f"README.md has {words} words, at most 900: move sentences to a page of docs/"
    marks = 100 * len(re.findall("[;:(]", visible(text))) / words
    assert marks <= 5, f"README.md has {marks:.1f} colons, semicolons and brackets per 100 words: at most 5"
    clauses = [len(clause.split()) for clause in re.split(r"(?<=[.:;])\s", prose) if clause.split()]
    mean = statistics.mean(clauses)
    assert mean >= 12, f"README.md has {mean:.1f} words a clause, at least 12: write whole sentences"
    long = [line for line in text.splitlines() if not line.startswith("|") and len(line) > 160]
    assert not long, f"README.md: break these lines at 160 characters: {long}"


NUMBERS = re.compile(r"(?<![\w.-])(?<!Table )\d[\d.,]*")


def test_each_finding_is_read_in_half_a_minute():
    text = (RESULTS / "README.md").read_text()
    findings = re.split(r"(?m)^\d\. ", text[text.index("## Findings") : text.index("## Every claim")])[1:]
    assert findings, "docs/results/README.md: number its findings, 1. 2. …, between '## Findings' and '## Every claim'"
    for finding in map(visible, findings):
        words, found = len(finding.split()), len(NUMBERS.findall(finding))
        advice = "at most 110 and 12: leave details to the page that it links"
        assert words <= 110 and found <= 12, f"{words} words and {found} numbers, {advice}: {finding}"


def test_the_documents_are_short_and_so_are_their_lines():
    own = [REPOSITORY / "CONTRIBUTING.md", *(page for page in PAGES if page.parent != RESULTS)]
    for page in own:
        lines = len(page.read_text().splitlines())
        assert lines <= 320, f"{page.name} has {lines} lines, at most 320: shorten it, or move a topic to another page"
    for page in [*own, *RESULTS.glob("*.md")]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_short = len(line) <= 200 or line.lstrip().startswith("|")
            assert is_short, f"{page.name}:{number} has {len(line)} characters: break the line at 200 or before"
