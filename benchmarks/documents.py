"""Write the numbers into README.md, keepless/README.md, docs/*.md and the pages of docs/results:

    python -m benchmarks.documents

Each text is between `<!-- NAME start -->` and `<!-- NAME end -->`. Its numbers come from the records in docs/results,
or are counted now, on fake tensors. A block named `kept` stays as it is: the code that wrote it is gone.
"""

import inspect
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keepless
from benchmarks import bounds, counted, fit, layers, memory_plan, networks, reversible, steps, tables
from benchmarks.frame import RESULTS, Benchmark, calls_text
from benchmarks.summaries import SUMMARIES, picture
from engine.configuration.command_line import configured
from engine.process.output_files import write_file
from scripts.compare_runs import named_groups, report
from scripts.reports import charts, papers
from scripts.reports.markdown import table, unfolded

BLOCK = re.compile(r"(?s)(?<=<!-- )(\w+)( start -->\n?)(.*?)(?=\n?<!-- \1 end -->)")  # name, mark, text
NAMES = ("README", "keepless/README", "docs/keepless", "docs/memory", "docs/training")
DOCUMENTS = [papers.REPOSITORY / f"{name}.md" for name in NAMES]
DOCUMENTS += sorted(RESULTS.glob("*.md"))
MEASURED = (bounds, fit, layers, memory_plan, networks, reversible, steps)
BENCHMARKS = [module.BENCHMARK for module in MEASURED]
RECORDS = {benchmark.name: file for benchmark in BENCHMARKS for file in RESULTS.rglob(f"{benchmark.name}.json")}
KEPT = "kept"  # a block whose code is gone: its commands name the commit that has it
FOLDERS = {file.parents[1].relative_to(RESULTS).as_posix() for file in RESULTS.rglob("results.json")}
COMPARISONS = {f"runs_{folder.replace('/', '_')}": folder for folder in FOLDERS}  # of runs in a folder of docs/results


def updated(text: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """A document with new text in its blocks, or in those whose names `only` accepts. KeyError: an unknown name."""

    def block(match: re.Match) -> str:
        name, mark, old_text = match.groups()
        return f"{name}{mark}{BLOCKS[name](old_text) if only(name) else old_text}"

    return BLOCK.sub(block, text)


def comparison(name: str, old_text: str) -> str:
    """What `scripts.compare_runs` reports for the command in the block."""
    command = re.search(r"(?m)^python -m scripts.compare_runs .*$", unfolded(old_text))
    assert command is not None, name
    runs, _, title = (word.partition("=")[2] for word in shlex.split(command[0])[3:])
    folder = COMPARISONS[name]
    groups, left_out = named_groups(runs.replace("OUT", str(RESULTS / folder)).strip("[]").split(","))
    return report(groups, left_out, title, f"{folder}.png").split("\n", 2)[2].strip()


def benchmark_text(benchmark: Benchmark, _: str) -> str:
    """Nothing if there is no record yet."""
    file = RECORDS.get(benchmark.name)
    if file is None:
        return ""
    return calls_text(benchmark, json.loads(file.read_text()), file.relative_to(RESULTS).with_suffix("").as_posix())


def printed(old_text: str) -> str:
    """A module, a command that takes it, and what the command prints now."""
    match = re.match(r"(?s)```py\n(.*?)```\n```\n\$ python -m (.*?)\n", old_text)
    assert match is not None, old_text
    module, *_ = re.findall(r"(\w+):", match[2])
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder, f"{module}.py"), match[1])
        command = [sys.executable, "-m", *shlex.split(match[2])]
        process = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True, text=True)
    return f"{match[0]}{process.stdout}```"


def functions(_: str) -> str:
    """The functions of keepless with their arguments, and the first sentence about each."""
    rows = []
    for name in filter(str.islower, keepless.__all__):
        function = getattr(keepless, name)
        if not inspect.isfunction(function) or function.__doc__ is None:
            continue  # __version__
        signature = inspect.signature(function)
        parameters = [
            parameter.replace(annotation=parameter.empty)
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_POSITIONAL
        ]
        arguments = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
        description = re.split(r"(?<=\.) (?=[A-Z])", " ".join(function.__doc__.split()).replace("|", r"\|"))[0]
        arguments = re.sub("<function (.*?) at .*?>", r"\1", arguments)  # a default
        rows.append([f"`{name}{arguments}`", description])
    return table(["function", "what it does"], rows, left=2)


# By name: text in the block -> its new text.
BLOCKS: dict[str, Callable[[str], str]] = {
    "bodies": lambda _: counted.bodies_table(),
    "recomputation": lambda _: counted.recomputation_table(),
    KEPT: str,
    "printed": printed,
    "functions": functions,
    **{name: partial(lambda name, _: SUMMARIES[name](), name) for name in SUMMARIES},
    **{name: partial(comparison, name) for name in COMPARISONS},
    **{benchmark.name: partial(benchmark_text, benchmark) for benchmark in BENCHMARKS},
    **{name: partial(lambda name, _: tables.of_results()[name], name) for name in (*papers.TABLES, tables.LEFT_OUT)},
}


@dataclass
class NoKeys:
    """The command takes no keys."""


@configured("documents", NoKeys)
def main(_: NoKeys) -> None:
    for document in DOCUMENTS:
        write_file(document, updated(document.read_text()))
    charts.save(picture(), papers.REPOSITORY / "docs" / "memory.png")


if __name__ == "__main__":
    main()
