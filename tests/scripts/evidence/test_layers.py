"""The layers' benchmark: what it counts and compares. No test asserts a time."""

import torch

from scripts.evidence import layers
from scripts.evidence.layers import BLOCKS, BUDGET, COMPILED, HOST, INPLACE_2, OURS, STANDARD, Cell, Work
from scripts.reports.markdown import grouped
from scripts.reports.measuring import peak_bytes
from tests.scripts.evidence.records import measured

TINY = ("batch=2", "channels=[8]", "pixels=[4]", "rounds=2", "sample_ms=0.1", "threads=1")


def test_every_strategy_has_a_row_with_its_bytes_and_host_time_has_none(in_process, tmp_path):
    """A whole run, with a compiler that takes no time."""
    groups = f"groups=[{','.join((*BLOCKS, *HOST))}]"
    call, text = measured("layers", tmp_path, groups, "compiler=aot_eager", "backend=eager", *TINY)
    cells = grouped(layers.frame.rows_of(call), ("group", "layout"), "strategy")
    assert len(cells) == 6
    for layout in layers.LAYOUTS:
        rows = cells[f"bn_act_conv, {layout}"]
        assert {STANDARD, *OURS.values(), COMPILED, BUDGET} <= rows.keys()
        kept = {name: round(row["saved_bytes"] / row["input_bytes"]) for name, row in rows.items()}
        assert kept == dict.fromkeys(kept, 1) | {STANDARD: 2, COMPILED: 3}  # this compiler keeps y as well
        assert all(row["peak_bytes"] > row["input_bytes"] == 2 * 8 * 4 * 4 * 4 for row in rows.values())
    rows = cells["bn_act, contiguous"]
    assert {STANDARD, *OURS.values(), COMPILED} <= rows.keys() and BUDGET not in rows
    assert rows[INPLACE_2]["backend"] == rows[STANDARD]["backend"] == "eager"
    assert rows[COMPILED]["backend"] == "aot_eager"
    for group in HOST:
        rows = cells[f"{group}, contiguous"]
        assert rows.keys() == {STANDARD, *OURS.values()}
        assert all(row["input_bytes"] == 8192 and row["saved_bytes"] is None for row in rows.values())
    assert text.count(f"| {INPLACE_2} |") == 7 and "record.png" in text  # in the summary and in six tables


def test_a_step_returns_all_gradients_and_an_owned_input_is_freed():
    cell = Cell("bn_act_conv", "CONV1", (2, 8, 4, 4), "channels_last", "float32", "cpu")
    block = cell.block(torch.nn.BatchNorm2d)
    work = Work(block, block, cell.tensor(cell.size).requires_grad_(), cell.tensor((2, 4, 4, 4)))
    expected = torch.autograd.grad(block(work.x), [work.x, *block.parameters()], work.dz)
    assert len(expected) == 4
    for gradients in (work.step(), work.owning_step()):
        torch.testing.assert_close(gradients, expected)
    assert work.x.is_contiguous(memory_format=torch.channels_last)
    # A sigmoid keeps its output only: input and output live together, then output and gradient.
    sigmoid, x = torch.nn.Sigmoid(), torch.randn(1000, requires_grad=True)
    assert peak_bytes(Work(sigmoid, sigmoid, x, torch.ones(1000)).owning_step, "cpu") == 2 * 1000 * 4
    # Inference has no backward pass.
    block = cell._replace(group="host_eval").block(torch.nn.BatchNorm2d)
    (output,) = Work(block, block, work.x, work.x).step()
    assert not output.requires_grad and torch.equal(block[0].running_mean, torch.zeros(8))


def test_the_page_has_the_overhead_of_the_papers_strategies():
    """Medians within rounds."""
    known = {"group": "bn_act_conv", "shape": "CONV1", "layout": "contiguous", "dtype": "float32", "saved_bytes": 100}
    times = {STANDARD: 1.0, **dict.fromkeys(OURS.values(), 1.01)}
    cell = {name: {**known, "times_ms": [ms, 2 * ms, 4 * ms]} for name, ms in times.items()}
    text = layers.overheads([cell])
    assert "medians: in-place II +1.0 %, in-place I +1.0 %, checkpointing (c) +1.0 %, checkpointing (b) +1.0 %." in text
    assert layers.overheads([]) == ""
