"""Parts "host" and "abn": the layers alone, graph replays beside eager steps."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from matplotlib.figure import Figure
from torch.autograd import DeviceType

from engine.memory import keep_freed_memory
from scripts.evidence import abn, abn_page
from scripts.evidence.abn_strategies import HOST, WITHOUT_LAUNCHES, Cell, Work, strategies
from scripts.evidence.frame import reason
from scripts.evidence.gpu.part import Part, Rows, Setting, bars
from scripts.evidence.measuring import Step, milliseconds, replayed
from scripts.reports.markdown import Columns, columns, section

TINY: dict = {"batch": 2, "channels": [2], "pixels": [2], "large": False, "dtypes": ["float32"], "rounds": 1}
TINY |= {"sample_ms": 0.01, "layouts": ["channels_last"]}
LAUNCH = "one operator"  # x.add_(1): the least that PyTorch takes for a kernel


def arguments(setting: Setting) -> abn.AbnArguments:
    own: dict = {"device": setting.device, "backend": setting.backend, "compiler": setting.compiler, "replays": True}
    return abn.AbnArguments(**own | (TINY if setting.rehearse else {}))


def cells(setting: Setting, groups: tuple[str, ...]) -> dict[str, tuple]:
    found = arguments(setting)
    found.groups = list(groups)
    return {f"{cell.group}/{cell.shape}/{cell.layout}/{cell.dtype}": (cell,) for cell in found.cells()}


def measure_blocks(setting: Setting, cell: Cell) -> Rows:
    """Rows of `scripts.evidence.abn` for one input; a strategy that has none is a row with the reason."""
    keep_freed_memory()
    chosen = arguments(setting)
    with abn.surroundings():
        rows, left_out = abn.measure_cell(cell, chosen, chosen.settings())
    where = {"cell": str(cell)}
    return [*rows, *({**where, "strategy": name, "reason": why} for name, why in left_out.items())]


def block_sections(rows: Rows) -> Iterator[str]:
    measured, left_out = [row for row in rows if "reason" not in row], [row for row in rows if "reason" in row]
    yield from abn_page.sections_of(measured, left_out, "gpu_abn")


def block_pictures(rows: Rows) -> Mapping[str, Figure]:
    return abn_page.pictures({"rows": [row for row in rows if "reason" not in row]})


def host_items(setting: Setting) -> dict[str, tuple]:
    found = cells(setting, HOST)
    if setting.rehearse:  # a program of Triton's interpreter takes a tenth of a second
        found = {name: (cell._replace(size=(2, 2, 2, 2)),) for name, (cell,) in found.items()}
    return {"launch": (None,), **found}


def measure_host(setting: Setting, cell: Cell | None) -> Rows:
    """Microseconds of a step on next to no data: of the host alone, of steps one after the other, and of replays."""
    if cell is None:
        x = torch.zeros(1, device=setting.device)
        return [_of_host(setting, "launch", LAUNCH, lambda: x.add_(1))]
    rows = []
    x = cell.tensor(cell.size).requires_grad_()
    with abn.surroundings():
        chosen = strategies(cell, None, setting.backend)[0]
        for strategy in (each for each in chosen if each.name != WITHOUT_LAUNCHES):
            block = cell.block(strategy.norm_act)
            work = Work(block, block, x, cell.tensor(cell.size))
            rows.append(_of_host(setting, cell.group, strategy.name, work.step))
    return rows


def _of_host(setting: Setting, group: str, name: str, step: Step) -> dict:
    for _ in range(1 if setting.rehearse else 5):
        step()
    row = {"group": group, "strategy": name, "kernels": _kernels(step)}
    row["host_us"] = _least_us(setting, lambda repeats: _enqueued_ms(step, repeats, setting.device))
    row["step_us"] = _least_us(setting, lambda repeats: milliseconds(step, repeats, setting.device))
    try:
        replay = replayed(step, setting.device)
    except Exception as error:  # it waits for the device, which no graph can hold
        return {**row, "not_replayed": reason(error)}
    return {**row, "replay_us": _least_us(setting, lambda repeats: milliseconds(replay, repeats, setting.device))}


def _least_us(setting: Setting, time_ms: Callable[[int], float]) -> float:
    """The median of rounds of 20 steps, few enough that no queue of the device is ever full."""
    return round(1e3 * statistics.median(time_ms(1 if setting.rehearse else 20) for _ in range(setting.rounds(50))), 2)


def _enqueued_ms(step: Step, repeats: int, device: str) -> float:
    """Mean time of the host in a step, which does not wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1e3 * (time.perf_counter() - started_s) / repeats


def _kernels(step: Step) -> int:
    """Kernels and copies that a step starts on the device; on the CPU 0."""
    with torch.profiler.profile(acc_events=True) as profile:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events() or ())


def _replay(row: dict) -> str:
    return f"{row['replay_us']:.1f}" if "replay_us" in row else row["not_replayed"]


COLUMNS: Columns = [
    ("step", lambda row: abn_page.TITLES.get(row["group"], "Launch")),
    ("strategy", "{strategy}"),
    ("kernels", "{kernels}"),
    ("host, µs", "{host_us:.1f}"),
    ("step, µs", "{step_us:.1f}"),
    ("replayed, µs", _replay),
]
ABOUT = (
    "*Host* is the time until Python has started everything, *step* that of steps one after the other, *replayed* that "
    "of the same step in a CUDA graph: the device's own. The input is 2x64x4x4, forward and backward pass."
)


def host_sections(rows: Rows) -> Iterator[str]:
    yield section("Host time", ABOUT, columns(rows, COLUMNS, left=2))


def host_pictures(rows: Rows) -> Mapping[str, Figure]:
    values = {"host, µs": lambda row: row["host_us"], "replayed, µs": lambda row: row.get("replay_us")}
    named = [{**row, "group": abn_page.TITLES.get(row["group"], "Launch")} for row in rows]
    return bars(named, "group", "strategy", values)


HOST_PART = Part("Host time of the layers", 1, host_items, measure_host, host_sections, host_pictures)
BLOCKS_PART = Part(
    "BN + ACT (+ CONV): time and memory of every strategy",
    7,
    lambda setting: cells(setting, ("bn_act", "bn_act_conv")),
    measure_blocks,
    block_sections,
    block_pictures,
)
