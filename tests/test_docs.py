"""The documentation agrees with the committed records, its links lead somewhere, and its training example works."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from keepless.saved import kept_bytes
from scripts.compare_runs import Comparison, compare
from scripts.evidence import (
    abn_page,
    documents,
    jpeg_originals,
    jpeg_quality,
    loader,
    loss,
    networks,
    networks_budget,
    plan_experiments,
    reconstruction_error,
    reversible,
    tables,
    training,
)
from scripts.evidence.gpu import run as gpu_run
from scripts.evidence.tables import Tables
from scripts.evidence.training_steps import DEFAULT, GROUPS
from tests import trees
from tests.faults import report

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "docs" / "results"
PAGES = {  # by the beginning of the record's name: record, its name -> the page's text
    "abn": abn_page.page,
    "gpu": gpu_run.page,
    "faults": lambda record, _: report.page(record),
    "jpeg_originals": jpeg_originals.page,
    "jpeg_quality": jpeg_quality.page,
    "loader": loader.page,
    "loss": loss.page,
    "memory": plan_experiments.page,
    "networks_budget": networks_budget.page,
    "networks": networks.page,
    "restored": reconstruction_error.page,
    "reversible": reversible.page,
    "training": training.page,
}
SLOW_BLOCKS = {"bodies", "recomputation"}  # they trace whole networks


def made_again(document: Path, folder: Path) -> str:
    """The text that the scripts make of a document's records; they may write into `folder`."""
    if document in documents.DOCUMENTS:
        return documents.written(document.read_text(), only=lambda name: name not in SLOW_BLOCKS)
    if document.name == "README.md":  # the papers' tables, of all runs
        shutil.copytree(RESULTS, folder / "results")
        arguments = Tables(str(folder / "results"), str(folder / "results"), str(RESULTS / "memory_plan.json"))
        return tables.write(OmegaConf.structured(arguments)).read_text()
    if document.with_suffix(".json").is_file():
        page = next(page for name, page in PAGES.items() if document.stem.startswith(name))
        return page(json.loads(document.with_suffix(".json").read_text()), document.stem)
    # A comparison of runs, with the page's own command.
    command = re.search(r"(?m)^python -m scripts.compare_runs .*$", document.read_text())[0]
    runs, _, title = (word.partition("=")[2] for word in shlex.split(command)[3:])
    runs = runs.replace("OUT", str(document.with_suffix(""))).strip("[]").split(",")
    page = compare(OmegaConf.structured(Comparison(runs, str(folder / document.stem), title)))
    assert page.with_suffix(".csv").read_text() == document.with_suffix(".csv").read_text()
    return page.read_text()


@pytest.mark.parametrize("document", [*documents.DOCUMENTS, *sorted(RESULTS.glob("*.md"))], ids=lambda path: path.stem)
def test_every_page_and_marked_block_is_what_the_scripts_make(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    assert made_again(document, tmp_path) == text
    if document.with_suffix(".json").is_file():
        assert document.with_suffix(".png").is_file() == (".png)" in text)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW_BLOCKS))
def test_the_tables_of_whole_networks_are_what_the_script_makes(name):
    for document in documents.DOCUMENTS:
        assert documents.written(document.read_text(), only=lambda found: found == name) == document.read_text()


def test_every_block_is_marked_and_every_measured_switch_has_a_row():
    marked = [name for path in documents.DOCUMENTS for name, *_ in documents.BLOCK.findall(path.read_text())]
    assert sorted(marked) == sorted(documents.BLOCKS)
    records = [documents.record(path.stem)["rows"] for path in RESULTS.glob("training_cpu*.json")]
    switches = {switch.name for group in GROUPS.values() for switch in group if not switch.only_cuda}
    assert {row["switch"] for rows in records for row in rows} == switches and DEFAULT in switches
    recomputed = {row["switch"]: row["saved_bytes"] for row in documents.record("training_cpu_recompute")["rows"]}
    assert abs(recomputed["norm=std trainer.recompute=activations"] / recomputed[DEFAULT] - 1) < 0.02


def test_a_block_is_made_again_whatever_its_numbers_were():
    """Otherwise the tests above could not fail."""

    def other_numbers(block: re.Match) -> str:
        return re.sub(r"(\| |-->)\d+\.\d+", r"\g<1>7.77", block[0]) if block[1] in from_records else block[0]

    from_records = {"budgets", "switches", "loop", "or_inplace"}
    changed_blocks = set()
    for path in documents.DOCUMENTS:
        text = path.read_text()
        changed = documents.BLOCK.sub(other_numbers, text)
        blocks = zip(documents.BLOCK.findall(text), documents.BLOCK.findall(changed), strict=True)
        changed_blocks |= {before[0] for before, after in blocks if before != after}
        assert documents.written(changed, only=from_records.__contains__) == text
    assert changed_blocks == from_records


def test_links_in_the_documentation_lead_somewhere():
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    for page in [page for page in pages if page.parent.name != "tables"]:  # links of the page that is made of them
        for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if not target.startswith("http"):
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name}: {target}"
                assert not heading or heading in headings(there), f"{page.name}: {target}#{heading}"


def headings(page: Path) -> list[str]:
    """As links name them."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize(
    "network, steps", [("lraspp_mobilenet_v3_large", 2), pytest.param("deeplabv3_resnet50", 10, marks=pytest.mark.slow)]
)
def test_the_training_in_layers_md_gives_the_same_losses_in_less_memory(tmp_path, double, network, steps):
    """In float64, with and without the line that it is about; in `make test` with a smaller network."""
    page = (REPOSITORY / "docs" / "layers.md").read_text()
    trees.camvid_annot(tmp_path, training_images=2 * steps)
    code = page[page.index("import torch\nfrom datasets") :].split("```")[0]
    assert "deeplabv3_resnet50" in code
    code = code.replace('"DIR"', repr(str(tmp_path))).replace("deeplabv3_resnet50", network)
    code = code.replace("range(10)", f"range({steps})")
    code = code.replace("    loss.backward()\n", "    losses.append(loss.item())\n    loss.backward()\n")
    lines = code.splitlines()
    plain = "\n".join(line for line in lines if not line.startswith("recompute_activations("))
    assert len(plain.splitlines()) == len(lines) - 1
    losses, kept = [], []
    for text in (plain, code):
        torch.manual_seed(0)
        names = {"losses": []}
        exec(text, names)
        losses.append(names["losses"])
        kept.append(kept_bytes(names["network"], lambda n=names: n["network"](n["images"]), [names["images"]]))
    assert len(losses[0]) == steps and losses[1] == pytest.approx(losses[0], rel=1e-8, abs=1e-8)
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize("page, most", [("README.md", 110), ("docs/memory.md", 260), ("docs/training.md", 220)])
def test_long_pages_stay_short(page, most):
    """Without the marks of their blocks, which readers do not see."""
    lines = (REPOSITORY / page).read_text().splitlines()
    assert len([line for line in lines if not line.startswith("<!-- ")]) <= most
