"""Every command in the documents is one that its program takes: it has the keys, the choices and the values."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks import documents, frame
from engine.configuration.command_line import SCHEMAS
from engine.configuration.multirun import words_of
from engine.configuration.texts import as_typed
from scripts import plan_memory, run_table
from scripts.reports import papers
from scripts.reports.markdown import unfolded
from tests import runs
from tests.runs import REPOSITORY

DOCS, RESULTS = REPOSITORY / "docs", REPOSITORY / "docs" / "results"
FRONT = [REPOSITORY / name for name in ("README.md", "keepless/README.md", "CONTRIBUTING.md")]
PAGES = [*FRONT, *sorted(DOCS.glob("*.md")), RESULTS / "README.md"]
RECORDS = sorted(set(RESULTS.glob("*.md")) - {*PAGES})
FOLDERS = ("", "scripts", "benchmarks", "tools")
PROGRAMS = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).glob("[!_]*.py"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONAL = re.compile(r"(?<= )\[((?:[^][]|\[[^][]*\])*)\]")  # [key=value]; before a list there is no space
PROGRAM = re.compile(r"^(scripts|benchmarks|tools)\.|\.py$|\.sbatch$")
COMMAND = re.compile(r"(python|torchrun|sbatch|make|init\.weights=\S+) ")  # or keys, to be added to a command


def commands(page: Path) -> list[str]:
    """The commands in the blocks and the text of a page, or in the docstring of a program."""
    text = page.read_text() if page.suffix == ".py" else unfolded(page.read_text())
    if page.suffix == ".py":
        text = re.sub(r"((?:^ {4}.*\n)+)", r"```\n\1```\n", ast.get_docstring(ast.parse(text)), flags=re.MULTILINE)
    if page == RESULTS / "README.md":  # its tables have the experiments' commands
        text = documents.BLOCK.sub(lambda match: "" if match[1] in papers.TABLES else match[0], text)
    # The code of other commits has other keys.
    blocks = [block for language, block in BLOCK.findall(text) if not language and "git checkout" not in block]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    # tests/test_plugins.py has choices of one's own.
    return [line for line in lines + inline if COMMAND.match(line) and "plugins=[mine]" not in line]


def readings(line: str) -> Iterator[list[str]]:
    """The words of a command, with its [optional] ones; several commands if it has alternatives: a|b, [a | b]."""
    words: list[list[str]] = []
    parts = iter(shlex.split(OPTIONAL.sub(r"\1", line), comments=True))
    for word in parts:
        if word == "|":
            words[-1].append(next(parts))
        elif word not in ("…", "experiment=…", "key=value"):  # of any run
            key, equals, value = re.sub("=N$", "=1", word.replace("…", "FILE")).rpartition("=")
            words.append([key + equals + choice for choice in value.split("|")])
    for number in range(max(map(len, words))):
        yield [choices[min(number, len(choices) - 1)] for choices in words]


def checked(words: list[str]) -> object:
    """The configuration of a command; None if it has none, or leaves open what it starts."""
    program, *rest = words
    if program == "make":
        assert TARGETS >= {word for word in rest if "=" not in word}, f"expected some of {TARGETS}"
        return None
    places = [number for number, word in enumerate(rest) if PROGRAM.search(word)]
    place = places[0] if places else -1
    module, keys = rest[place].removesuffix(".py"), rest[place + 1 :]
    if "=" in program or module.endswith(".sbatch"):
        module, keys = "train_seg", [word for word in words if "=" in word]
    elif place < 0:
        return None
    importlib.import_module(module)  # declares the command
    name = plan_memory.entry_of(keys) if module == "scripts.plan_memory" else module.split(".")[-1]
    if "-m" in keys:
        keys.remove("-m")
        parsed = OverridesParser.create().parse_overrides([as_typed(word, SCHEMAS[name], sweeps=True) for word in keys])
        ours = [override for override in parsed if not override.is_hydra_override()]
        assert any(override.is_sweep_override() for override in ours)
        keys = [words_of(override)[0] for override in ours]
    return runs.checked(name, *(key for key in keys if not key.startswith("-")))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A folder with the file and the folder that commands name, on a machine that has every device."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    Path("DIR").mkdir()
    monkeypatch.setattr(frame, "device_of", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def wrong(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        for words in readings(line):
            try:
                checked(words)
            except (ValueError, AssertionError, ImportError) as error:
                yield line, f"{error} {error.__cause__ or ''}"


QUICK = [REPOSITORY / name for name in ("README.md", "docs/data.md", "eval.py")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK), id=page.relative_to(REPOSITORY).as_posix())
        for page in (*PAGES, *PROGRAMS, *RECORDS)
    ],
)
def test_every_command_of_the_documents_composes(page):
    assert list(wrong(commands(page))) == []


@pytest.mark.slow
def test_every_command_of_the_experiments_composes():
    for name in papers.all_experiments():
        lines = [f"python eval.py checkpoint=FILE {row.evaluation}" for row in papers.published_scores(name)]
        lines += filter(None, [papers.paper_of(name).get("command")])
        assert list(wrong(dict.fromkeys(lines))) == [], f"{name}: correct the words at the head of its file"


@pytest.mark.slow
def test_a_dry_run_lists_every_row_of_a_table(capsys):
    """Rows that another row trains are left out."""
    assert run_table.run(runs.checked("run_table", "table=table3", "dry_run=true")) == 0
    listed = re.findall(r"experiment=(\S+)", capsys.readouterr().out)
    assert listed == [name for name in papers.experiments_of("table3") if papers.first_of(name) == name]


def test_commands_are_found_and_wrong_ones_noticed():
    """Otherwise the tests above could not fail."""
    lines = [line for page in PAGES for line in commands(page)]
    assert len(lines) > 80 and sum(line.startswith("torchrun") for line in lines) > 5
    alternatives = [" ".join(words) for words in readings("python a.py [b=1|2] [c=[1] | d=e] # f")]
    assert alternatives == ["python a.py b=1 c=[1]", "python a.py b=2 d=e"]
    lines = [
        "make demos",
        "python -m scripts.gone a=b",
        "python train_seg.py optim.lrr=1",
        "torchrun --nproc-per-node 4 train_seg.py experiment=cifar10/resnet14",
        "python train_imagenet.py … norm=package norm.activation=relu",
        "python eval.py tta.flip=true",
        "python train_seg.py optim.lr=$lr seed=0,1",
        'python -m scripts.run_table table=table3 "weights={resnext101: GONE}"',
        "init.weights=FILE init.format=caffe",
        "sbatch --nodes 2 scripts/slurm.sbatch run_dir=RUN_DIR resume=always",
    ]
    assert [line for line, _ in wrong(lines)] == lines
