"""The documentation's numbers match the files beside it, and its links work."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from scripts.bench.frame import ratio_of
from scripts.bench.loader_pictures import write_camvid
from scripts.bench.measuring import kept_bytes
from scripts.compare_runs import Comparison, compare

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "docs" / "results"
# The tests of the script that wrote them check pages with a JSON file of their own.
PAGES = sorted(
    path for path in RESULTS.glob("*.md") if path.name != "README.md" and not path.with_suffix(".json").exists()
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_what_the_script_makes_of_their_files(page, tmp_path):
    """With the command that docs/results/README.md gives for the page."""
    row = next(line for line in (RESULTS / "README.md").read_text().splitlines() if f"({page.name})" in line)
    command = re.search(r"`(python -m scripts.compare_runs [^`]*)`", row).group(1)
    runs, out, title = (word.partition("=")[2] for word in shlex.split(command)[3:])
    assert REPOSITORY / f"{out}.md" == page
    folders = [str(REPOSITORY / folder) for folder in runs.strip("[]").split(",")]
    again = compare(OmegaConf.structured(Comparison(runs=folders, out=str(tmp_path / page.stem), title=title)))
    assert again.read_text() == page.read_text()


def test_scores_in_the_readme_are_those_of_the_runs():
    """Rows end in a link to the results, docs/results/PAGE/RUN/results.json, and hold its score in percent."""
    rows = re.findall(r"\|([^\n]*)\]\((docs/results/\S+/results\.json)\) \|", (REPOSITORY / "README.md").read_text())
    assert len(rows) >= 3
    for row, file in rows:
        results = json.loads((REPOSITORY / file).read_text())
        assert f"{100 * results.get('miou', results.get('top1')):.2f}" in row, file


def test_costs_in_the_readme_are_those_of_the_records():
    """Bytes kept per pixel are in docs/memory.md's table, which another test compares with the networks."""
    rows = re.findall(r"^\| (.*) \| ([\d.,]+) \| ([\d.,]+) \| \[", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    written = {about: (standard, inplace) for about, standard, inplace in rows}
    memory = (REPOSITORY / "docs" / "memory.md").read_text()
    for about in [about for about in written if "bytes per input pixel" in about]:
        for norm, value in zip(("std", "inplace"), written.pop(about), strict=True):
            assert re.search(rf"\| {norm} \|.*\b{value}\b", memory), about
    plan = json.loads((RESULTS / "memory_plan.json").read_text())
    first = {
        row["combination"]: row["peak"]
        for row in plan["one_device"]
        if (row["network"], row["crops"], row["crop_size"]) == ("cityscapes_resnext101", 16, 512)
    }
    about_plan = [about for about in written if about.startswith("planned: ")]
    for about, kind in zip(about_plan, ("float32", "trainer.recompute=sqrt, bfloat16"), strict=True):
        for norm, value in zip(("standard", "in-place"), written.pop(about), strict=True):
            assert f"{(first[f'{norm} norms, {kind}'] + plan['reserved']) / 2**30:.1f}" == value, about
    records = json.loads((RESULTS / "training_cpu_norms.json").read_text())["rows"]
    found = {row["switch"]: row for row in records if row["switch"] in ("norm=std", "default")}
    standard, inplace = found["norm=std"], found["default"]
    costs = [tuple(f"{row[kind] / 2**20:.1f}" for row in (standard, inplace)) for kind in ("saved_bytes", "peak_bytes")]
    times_ms = ([ms for start in row["times_ms"] for ms in start] for row in (standard, inplace))
    costs.append(tuple(f"{statistics.median(times):.0f}" for times in times_ms))
    assert list(written.values()) == costs


# The methods in each row of docs/memory.md's table of budgets.
BUDGETS = (
    ["ResNet-110, std, compiled, budget 1"],
    ["ResNet-110, inplace", "ResNet-110, std, compiled, budget 0.5"],
    ["ResNet-110, inplace, blocks"],
    ["ResNet-110, inplace, sqrt"],
    ["RevNet-110, inplace, reversible"],
)


def test_costs_of_each_budget_are_those_of_the_record():
    text = (REPOSITORY / "docs" / "memory.md").read_text().split("## Which one, for which budget")[1].split("\n## ")[0]
    rows = {row["method"]: row for row in json.loads((RESULTS / "reversible.json").read_text())["budget"]}
    standard = rows["ResNet-110, std"]
    assert f"({standard['peak_bytes'] / 2**20:.0f} MiB)" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for line, methods in zip(lines, BUDGETS, strict=True):
        peaks = [f"{rows[method]['peak_bytes'] / 2**20:.0f}" for method in methods]
        times = [f"{ratio_of(rows[method]['times_ms'], standard['times_ms']).median:.2f}" for method in methods]
        assert line.endswith(f"| {'; '.join(peaks)} | {'; '.join(times)} |"), methods


def test_links_in_the_documentation_lead_somewhere():
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("steps", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_the_example_in_the_readme_gives_the_same_losses_in_less_memory(tmp_path, steps):
    """In float64, with and without the line that it is about."""
    readme = (REPOSITORY / "README.md").read_text()
    write_camvid(tmp_path, images=2 * steps, size=(32, 40))
    code = readme[readme.index("import torch\nfrom datasets") :].split("```")[0]
    code = code.replace('"DIR"', repr(str(tmp_path))).replace("range(10)", f"range({steps})")
    code = code.replace("    loss.backward()\n", "    losses.append(loss.item())\n    loss.backward()\n")
    lines = code.splitlines()
    plain = "\n".join(line for line in lines if not line.startswith("recompute_activations("))
    assert len(plain.splitlines()) == len(lines) - 1
    losses, kept = [], []
    torch.set_default_dtype(torch.float64)
    try:
        for text in (plain, code):
            torch.manual_seed(0)
            names = {"losses": []}
            exec(text, names)
            losses.append(names["losses"])
            kept.append(kept_bytes(names["network"], lambda n=names: n["network"](n["images"]), [names["images"]]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(losses[0]) == steps and losses[1] == pytest.approx(losses[0], rel=1e-8, abs=1e-8)
    assert kept[1] < 0.6 * kept[0]


def test_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150
