"""The papers' tables: what was published, which runs count, and the commands for the rest."""

import itertools
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.frame import RESULTS
from benchmarks.tables import Tables
from scripts import run_table
from scripts.reports import papers
from scripts.reports.runs import Run, by_configuration, titles_of
from scripts.run_table import RunTable
from tests import trees
from tests.benchmarks.records import changed, copied
from tests.runs import checked

pytestmark = pytest.mark.slow

PAPERS = [table for table, title in papers.TABLES.items() if title.startswith(("In-Place ABN", "RevNet", "MemCNN"))]


def page_of(tmp_path: Path, *runs: Path) -> str:
    return tables.write(Tables(runs=[str(run) for run in runs], out=str(tmp_path / "out"))).read_text()


@pytest.fixture
def of_few_tables(monkeypatch):
    """Composing every experiment takes ten seconds."""
    choices = {name: entry for name, entry in papers.all_experiments().items() if name.startswith("cifar10/")}
    monkeypatch.setattr(papers, "all_experiments", lambda: choices)
    monkeypatch.setattr(papers, "TABLES", {"cifar10": papers.TABLES["cifar10"]})


def test_every_row_has_a_published_score_and_a_command():
    for name in {*itertools.chain(*map(papers.experiments_of, PAPERS))}:
        is_row = papers.published_scores(name) and f"experiment={name}" in papers.command_of(name).split()
        assert is_row, f"{name}: a row of a paper has a score and a command; one's own leaves `table` out"


@pytest.mark.parametrize(
    "mapping, message",
    [
        ("{table: table3", "is no YAML mapping: while parsing a flow mapping"),
        ("{miou: good}", "paper: miou=good: expected a score in percent, or one of table, row, command, "),
        ("{table: table5}", "paper: table=table5: expected one of table1, .*, or none$"),
    ],
)
def test_what_a_head_cannot_say_is_named(mapping, message, tmp_path, monkeypatch):
    """An entry is optional, and so is the mapping."""
    (tmp_path / "experiment").mkdir()
    monkeypatch.setattr("engine.configuration.choices.CONFIGS", tmp_path)
    monkeypatch.setattr(papers, "CONFIGS", tmp_path)
    head = "# Mine.\n# paper: {miou: 7.5,\n#   table: table3}\n# More.\n"
    for name, text in (("wrong", f"# paper: {mapping}\n"), ("right", head), ("without", "# Mine.\n")):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"{text}defaults: []\n")
    with pytest.raises(ValueError, match=f"experiment/wrong.yaml: .*{message}"):
        papers.tables_of("wrong")
    assert papers.tables_of("right") == ["table3"] and papers.published_scores("right")[0].percent == 7.5
    assert papers.tables_of("without") == papers.published_scores("without") == papers.weights_of("without") == []


@pytest.mark.usefixtures("of_few_tables")
def test_a_seed_counts_once_from_the_folder_with_most_seeds(tmp_path):
    copied(tmp_path / "runs" / "again" / "one", 0.70, seed=0)
    copied(tmp_path / "runs" / "seeds" / "first", 0.88, seed=0)
    copied(tmp_path / "runs" / "seeds" / "second", 0.90, seed=1)
    text = page_of(tmp_path, tmp_path / "runs")
    (row,) = [line for line in text.splitlines() if line.startswith("| cifar10/resnet14 |")]
    assert " 89.00 ± 1.41 |" in row
    assert "- ../runs/again/one: it repeats ../runs/seeds/first\n" in text


@pytest.mark.usefixtures("of_few_tables")
def test_a_run_without_tf32_says_so_if_it_was_on_cuda(tmp_path):
    """The records of CPUs, where it has no effect, are from before it became the default."""
    cpu, cuda = copied(tmp_path / "runs" / "cpu", 0.90), copied(tmp_path / "runs" / "cuda", 0.92, seed=1)
    assert "`trainer.tf32=false`" not in page_of(tmp_path, cpu, cuda)
    config = cuda / "config.yaml"
    config.write_text(config.read_text().replace("# 1 x cpu", "# 1 x cuda"))
    assert " 90.00; 92.00, with `trainer.tf32=false` |" in page_of(tmp_path, cpu, cuda)
    assert len({*titles_of(by_configuration([Run(cpu), Run(cuda)]))}) == 2


@pytest.mark.usefixtures("of_few_tables")
def test_what_is_in_no_row_is_named(tmp_path):
    with pytest.raises(ValueError, match="runs: .*nowhere is not a folder"):
        page_of(tmp_path, tmp_path / "nowhere")
    run, stray = copied(tmp_path / "runs" / "one"), copied(tmp_path / "runs" / "two", 0.8, seed=1)
    changed(stray, lambda results: results.update(accuracy={"cat": 1.0}))
    with pytest.raises(ValueError, match=f"runs: {run} and {stray} are both cifar10/resnet14, but of other classes"):
        page_of(tmp_path, tmp_path / "runs")
    (stray / "results.json").unlink()
    config = copied(tmp_path / "runs" / "mine", optim={"lr": 1e-9}) / "config.yaml"
    config.write_text("# python train_imagenet.py\n" + config.read_text().partition("\n")[2])
    text = page_of(tmp_path, tmp_path / "runs")
    assert "- ../runs/two: it has not ended (step 7800)\n- ../runs/mine: it is of no experiment\n" in text


@pytest.mark.usefixtures("of_few_tables")
def test_a_table_runs_what_is_missing_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    commands, places = [], []

    def run_job(place, title, command, console, folder):
        commands.append(command)
        places.append(place)
        run_dir = Path(next(word for word in command if word.startswith("run_dir=")).removeprefix("run_dir="))
        if "preact_resnet32" in str(run_dir) and len(commands) < 4:
            return f"{title}: exit status 1"
        name = run_dir.parent.name
        source = {"resnet14": "cifar/norms/inplace", "revnet38": "cifar/short/revnet38_seed0"}
        shutil.copytree(RESULTS / source.get(name, "cifar/short/resnet32_seed0"), run_dir, dirs_exist_ok=True)
        (run_dir / "config.yaml").write_text(f"# {shlex.join(['python', *command[1:]])}\n# 1 x cpu\n")
        return None

    monkeypatch.setattr(run_table, "run_job", run_job)
    monkeypatch.setattr(run_table, "check_files", lambda arguments: None)
    arguments = dict(table="cifar10", runs=str(tmp_path), roots={"cifar10": "/a/DIR"}, seeds=[0])
    arguments["overrides"] = ["init.weights=/a b.pt"]
    assert run_table.run(RunTable(**arguments, dry_run=True)) == 0 and not commands
    assert run_table.run(RunTable(**arguments)) == 1
    assert [command[2] for command in commands] == [f"experiment={name}" for name in papers.experiments_of("cifar10")]
    assert all({"seed=0", "data.root=/a/DIR", "resume=auto"} <= set(command) for command in commands)
    assert run_table.run(RunTable(**arguments)) == 0 and len(commands) == 4
    assert places == ["job 1 of 3", "job 2 of 3", "job 3 of 3", "job 1 of 1"]
    assert "\n1 succeeded, 2 had already finished, 0 failed\n" in capsys.readouterr().out
    assert not any(job.has_ended for job in run_table.trainings_of(RunTable(**arguments, devices=2)))
    assert run_table.run(RunTable(**{**arguments, "overrides": ["trainer.steps=1"]})) == 0
    assert places[4:] == places[:3]  # other commands: each training refuses what it cannot continue


@pytest.mark.usefixtures("of_few_tables")
def test_a_wrong_override_of_a_table_is_named():
    with pytest.raises(ValueError, match=r"^optim.learning_rate=3: there is no such key; give optim.lr=3$"):
        run_table.trainings_of(RunTable(table="cifar10", overrides=["optim.learning_rate=3"]))


def test_rows_that_are_one_training_run_once_on_the_devices_of_the_header(tmp_path):
    arguments = RunTable(table="table3", runs=str(tmp_path), roots={"cityscapes": "DIR"}, weights={"wrn38": "FILE"})
    job = run_table.training_of("table3/cityscapes_wrn38_std", 0, arguments)
    assert job.command[1:6] == ["-m", "torch.distributed.run", "--nproc-per-node", "4", "train_seg.py"]
    assert "init.weights=FILE" in job.command and not job.missing and job.steps == 360 * (2975 // 20)
    job = run_table.training_of("table3/coco_stuff_resnext101_std", 0, arguments)
    assert job.missing == [
        "roots={coco_stuff: DIR}",
        "weights={resnext101: FILE}",
    ]  # which serves all rows of this body
    assert {"data.root=DIR", "init.weights=FILE"} <= {*job.command}
    arguments.overrides = ["data.root=/data", "init.weights=/net.pt"]
    job = run_table.training_of("table3/coco_stuff_resnext101_std", 0, arguments)
    assert not job.missing and {"data.root=DIR", "init.weights=FILE"}.isdisjoint(job.command)


def test_a_dry_run_prints_the_evaluations_that_rows_need(tmp_path, capsys):
    """Table 1 has twelve numbers of two trainings, each of which evaluates its network as trained."""
    assert run_table.run(RunTable(table="table1", runs=str(tmp_path), dry_run=True)) == 0
    words = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if " eval.py " in line]
    assert words == [
        ["eval.py", f"checkpoint={tmp_path}/{experiment}/seed0", *options.split()]
        for experiment, exchanged in (("table1/resnext101_relu", "leaky_relu"), ("table2/resnext101_std_256", "relu"))
        for activation in ("", f"activation={exchanged} ")
        for options in (f"{activation}{view}" for view in ("", "view=ten_crop", "crop=320"))
        if options
    ]
    row = papers.published_scores("table1/resnext101_relu")[-1]
    config = papers.configured_as("table1/resnext101_relu")
    assert papers.results_of(row.evaluation, config) == "results_leaky_relu_crop320"


@pytest.mark.parametrize(
    "experiment, devices, overrides, added, changed",
    [
        ("std", 2, [], ["trainer.accumulation_steps=2"], []),
        ("std", 8, [], [], ["processes=8 trainer.accumulation_steps=1"]),
        ("std", 1, ["trainer.accumulation_steps=2"], [], ["processes=1 trainer.accumulation_steps=2"]),
        ("inplace_sync_fixed_batch", 1, [], [], []),
    ],
)
def test_norms_see_as_many_crops_on_fewer_devices(tmp_path, experiment, devices, overrides, added, changed):
    arguments = RunTable(table="table3", runs=str(tmp_path), devices=devices, overrides=overrides)
    job = run_table.training_of(f"table3/cityscapes_resnext101_{experiment}", 0, arguments)
    assert [word for word in job.command if "accumulation" in word] == [*added, *overrides]
    assert job.changed == changed


def test_a_dry_run_looks_at_the_data_and_the_weights_that_it_is_given(tmp_path, capsys):
    root, table = trees.camvid_folders(tmp_path / "camvid"), {"table": "camvid_table3", "runs": str(tmp_path)}
    (tmp_path / "net.pt").write_bytes(b"no weights")
    for paths, says in (
        (
            {"roots": {"camvid": str(root)}},
            "^roots={camvid: .*data.train_split=train has 6 of the 367 images of camvid",
        ),
        ({"roots": {"camvid": str(tmp_path)}}, "data.root=.*: camvid: the folder .*train.* is missing"),
        ({"weights": {"std": str(tmp_path / "net.pt")}}, r"^weights=\{std: .*net.pt\}: ValueError: checkpoint"),
    ):
        with pytest.raises(ValueError, match=says):
            run_table.run(RunTable(**table, **paths, dry_run=True))
    whole = {"roots": {"camvid": str(root)}, "overrides": ["data.incomplete=true"]}
    assert (
        run_table.run(RunTable(**table, **whole, dry_run=True)) == 0
        and "data.incomplete=true" in capsys.readouterr().out
    )


@pytest.mark.usefixtures("of_few_tables")
def test_the_command_takes_folders_by_name_and_names_those_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_table, "check_files", lambda arguments: None)
    options = ["roots={cifar10: DIR, cifar100: DIR}", f"weights={{resnet: {tmp_path}}}"]  # or a file
    values = checked("run_table", "table=cifar10", "dry_run=true", f"runs={tmp_path}", *options)
    assert run_table.run(values) == 0
    printed = capsys.readouterr().out
    assert printed.count("data.root=DIR") == 3 and "cifar10/resnet14, seed 0" in printed
    for option, message in (
        ("roots={citiscapes: DIR}", "roots={citiscapes: …}: expected one of camvid, cifar10, "),
        ("weights={xyz: b}", "weights={xyz: …}: no experiment has"),
        ("weights={resnet: b}", "weights={resnet: b}: there is no such file"),
        ("overrides=[trainer.steps=9,seed=3]", r"overrides=\[seed=3\]: a table sets these itself; give seeds="),
    ):
        with pytest.raises(ValueError, match=message):
            run_table.run(checked("run_table", "table=cifar10", option))
    with pytest.raises(ValueError, match=r"table=cifar10.?needs roots=\{cifar10: DIR\}"):  # before anything runs
        run_table.run(RunTable(table="cifar10", runs=str(tmp_path)))


FAST = {
    **{"trainer.precision": "bfloat16", "trainer.channels_last": "false", "trainer.capture": "true"},
    **{"trainer.tf32": "false", "trainer.deterministic": "true", "optim.fused": "false", "norm.backend": "triton"},
    "trainer.evaluate_batch_size": "8",
}
ON_FOUR, SMALL = "table3/cityscapes_resnext101_std", "camvid/resnext_small"


@pytest.mark.parametrize(
    "name, overrides, processes, changed",
    [
        (ON_FOUR, ["init.weights=FILE"], 4, []),
        (ON_FOUR, ["init.weights=FILE", "init.format=released", "seed=3", "trainer.recompute=sqrt"], 4, []),
        (ON_FOUR, [], 4, ["init.weights=null"]),
        (ON_FOUR, ["init.weights=FILE"], 1, ["processes=1 trainer.accumulation_steps=1"]),
        (ON_FOUR, ["init.weights=FILE", "trainer.accumulation_steps=4"], 1, []),
        (ON_FOUR, ["init.weights=FILE", "norm.sync=true"], 4, ["norm.sync=true"]),
        (ON_FOUR, ["init.weights=FILE", *(f"{key}={value}" for key, value in FAST.items())], 4, []),
        (SMALL, ["data.antialias=false"], 1, []),  # its images never shrink so far that it would change a pixel
        (SMALL, ["data.antialias=false", "data.base_size=100"], 1, ["data.base_size=100", "data.antialias=false"]),
    ],
)
def test_what_makes_a_run_another_than_the_row(name, overrides, processes, changed):
    assert papers.changed_keys(papers.configured_as(name, *overrides), name, processes) == changed


def test_a_training_of_two_tables_has_the_name_of_the_first():
    first = "revnet/cifar10_resnet32"
    assert papers.first_of("memcnn/cifar10_resnet32") == papers.first_of(first) == first


def test_experiments_are_the_same_training_if_their_files_set_the_same():
    """Composing them says the same, but takes a fifth of a second each."""
    names = list(papers.all_experiments())
    trainings = {name: papers._values_of_row(name) for name in names}
    for name in names:
        same = [experiment for experiment in names if experiment != name and trainings[experiment] == trainings[name]]
        assert papers.equal_trainings(name) == same
