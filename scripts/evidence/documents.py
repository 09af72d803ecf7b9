"""Write the numbers into README.md, docs/*.md and the pages of docs/results:

    python -m scripts.evidence.documents

Each table or phrase is between `<!-- NAME start -->` and `<!-- NAME end -->`. Numbers come from the
records in docs/results, or are counted now, on fake tensors. Other words in tables are written by hand and stay.
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from omegaconf import DictConfig

from engine.configuration.command_line import configured
from engine.process.output_files import write_file
from scripts.compare_runs import Group, compared, report
from scripts.evidence import (
    check,
    counted,
    fit,
    layers,
    loader,
    loss,
    memory_plan,
    networks,
    ranks,
    reversible,
    tables,
    training,
)
from scripts.evidence.counted import Cells
from scripts.reports import papers
from scripts.reports.frame import BLOCK, RESULTS, Benchmark, calls_text, rows_of, with_blocks
from scripts.reports.markdown import GIB, mib

DOCUMENTS = [papers.REPOSITORY / f"{name}.md" for name in ("README", "docs/memory", "docs/training")]
DOCUMENTS += sorted(RESULTS.glob("*.md"))
BENCHMARKS = [module.BENCHMARK for module in (layers, loader, loss, memory_plan, networks, reversible, training)]
OF_A_GPU = [module.BENCHMARK for module in (check, fit, ranks)]  # their records are in docs/results/gpu
FOLDERS = {file.parents[1].relative_to(RESULTS).as_posix() for file in RESULTS.rglob("results.json")}
COMPARISONS = {f"runs_{folder.replace('/', '_')}": folder for folder in FOLDERS}  # of runs in a folder of docs/results


def written(text: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """A document with new numbers in its blocks, or in those whose names `only` accepts. KeyError: an unknown name."""

    found = {name: before for name, _, before in BLOCK.findall(text)}
    return with_blocks(text, {name: BLOCKS[name](before) for name, before in found.items() if only(name)})


def filled(make: Callable[[], Cells], table: str) -> str:
    """A table whose cells after the rows' names are made again. ValueError: the table has no such row."""
    cells = make()
    titles, rule, *lines = table.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = set()
    for row in rows:
        for count in (1, 2):
            name = ", ".join(row[:count])
            own = cells.get(name) or cells.get(name.strip("`"))
            if own is not None:
                found.add(name if name in cells else name.strip("`"))
                row[count : count + len(own)] = [new or old for new, old in zip(own, row[count:], strict=False)]
    if missing := cells.keys() - found:
        raise ValueError(f"the table with {titles} has no row for {', '.join(missing)}")
    return "\n".join([titles, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def comparison(name: str, before: str) -> str:
    """What `scripts.compare_runs` reports for the command in the block."""
    command = re.search(r"(?m)^python -m scripts.compare_runs .*$", before)
    assert command is not None, name
    runs, _, title = (word.partition("=")[2] for word in shlex.split(command[0])[3:])
    folder = COMPARISONS[name]
    groups, left_out = compared(runs.replace("OUT", str(RESULTS / folder)).strip("[]").split(","))
    return report(groups, left_out, title, f"{folder}.png").split("\n", 2)[2].strip()


def results_cells() -> Cells:
    """Cost or score of the usual method, and of this project's."""
    kept = counted.kept("ResNeXt-101")
    switches = training.measured_with(record("training"), "norms")
    both = switches["norm=std"], switches[training.DEFAULT]
    seeds = {group.title: group.percent("mIoU") for group in compared([str(RESULTS / "camvid" / "table3")])[0]}
    return {
        "bytes kept for the backward pass per pixel, ResNeXt-101 + DeepLabV3, counted": [
            f"{kept[norm]:,}" for norm in ("std", "inplace")
        ],
        "GiB of one device for a step of Table 3 (16 crops of 512²), planned": _planned("float32"),
        "the same in bfloat16 with recomputed blocks, planned": _planned("trainer.recompute=sqrt, bfloat16"),
        "peak MiB; ms of a step of a small ResNeXt, measured": [
            f"{mib(own[0]['peak_bytes'], 0)}; {training.median_ms(own)}" for own in both
        ],
        "peak MiB; ms of the bootstrapped loss of 182 classes, measured": [
            loss.way_text(record("loss"), way) for way in (loss.PLAIN, loss.TILES)
        ],
        "mIoU on CamVid, small ResNeXt from scratch, one run each": _scores("camvid/norms", ("std", "inplace")),
        "mIoU on CamVid in the same memory, 3 and 2 seeds": [
            f"{seeds[row][0]:.1f} ± {seeds[row][1]:.1f}" for row in ("std", "inplace_fixed_batch")
        ],
        "top-1 on CIFAR-10 as JPEG, RevNet's recipe, one run each": _scores("cifar/table3", ("resnet32", "revnet38")),
    }


def _planned(kind: str) -> list[str]:
    """GiB on one device for the minibatch of Table 3's first row."""
    rows = rows_of(record("memory_plan")["calls"][0], "one_device")
    own = {row["combination"]: row["device"] for row in rows if (row["crops"], row["crop_size"]) == (16, 512)}
    return [f"{own[f'{norm}, {kind}'] / GIB:.1f}" for norm in ("standard norms", "in-place norms")]


def _scores(folder: str, runs: tuple[str, ...]) -> list[str]:
    groups = [Group(name, compared([str(RESULTS / folder / name)])[0][0].runs) for name in runs]
    return [f"{group.percent(group.runs[0].scores.best_title)[0]:.2f}" for group in groups]


CELLS: dict[str, Callable[[], Cells]] = {
    "results": results_cells,
    "bodies": counted.bodies_cells,
    "recomputation": counted.recomputation_cells,
    "ranges": counted.ranges_cells,
}


def benchmark_text(benchmark: Benchmark, name: str, _: str) -> str:
    return calls_text(benchmark, record(name), name)


def table_text(name: str, _: str) -> str:
    return tables.of_results()[name]


BLOCKS: dict[str, Callable[[str], str]] = {
    **{name: partial(filled, cells) for name, cells in CELLS.items()},
    **{name: partial(comparison, name) for name in COMPARISONS},
    **{own.name: partial(benchmark_text, own, own.name) for own in BENCHMARKS},
    **{own.name: partial(benchmark_text, own, f"gpu/{own.name}") for own in OF_A_GPU},
    **{name: partial(table_text, name) for name in (*papers.TABLES, tables.LEFT_OUT)},
}


@dataclass
class NoKeys:
    """The command takes no keys."""


@configured("documents", NoKeys)
def main(_: DictConfig) -> None:
    for document in DOCUMENTS:
        write_file(document, written(document.read_text()))


if __name__ == "__main__":
    main()
