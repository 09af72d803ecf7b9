"""Parts "host" and "abn": the layers alone, graph replays beside eager steps."""

from collections.abc import Iterator, Mapping
from functools import partial

from matplotlib.figure import Figure

from engine.memory import keep_freed_memory
from scripts.evidence import abn, abn_page
from scripts.evidence.abn_strategies import BLOCKS, HOST, Cell
from scripts.evidence.gpu.part import Part, Rows, Setting, without_reasons

TINY: dict = {"large": False, "dtypes": ["float32"], "rounds": 1, "sample_ms": 0.01, "layouts": ["channels_last"]}
TINY |= {"channels": [2], "pixels": [2]}


def arguments(setting: Setting) -> abn.AbnArguments:
    own: dict = {"device": setting.device, "backend": setting.backend, "compiler": setting.compiler, "replays": True}
    return abn.AbnArguments(**own | (TINY if setting.rehearse else {}))


def items(groups: tuple[str, ...], setting: Setting) -> dict[str, tuple]:
    found = arguments(setting)
    found.groups = list(groups)
    cells = found.cells()
    if setting.rehearse:  # a program of Triton's interpreter takes a tenth of a second
        cells = (cell._replace(size=(2, 2, 2, 2)) for cell in cells)
    return {f"{cell.group}/{cell.shape}/{cell.layout}/{cell.dtype}": (cell,) for cell in cells}


def measure(setting: Setting, cell: Cell) -> Rows:
    """Rows of `scripts.evidence.abn` for one input; a strategy that has none is a row with the reason."""
    keep_freed_memory()
    chosen = arguments(setting)
    with abn.surroundings():
        rows, left_out = abn.measure_cell(cell, chosen, chosen.settings())
    return [*rows, *({"cell": str(cell), "strategy": name, "reason": why} for name, why in left_out.items())]


def sections(name: str, rows: Rows) -> Iterator[str]:
    left_out = [row for row in rows if "reason" in row]
    yield from abn_page.sections_of(without_reasons(rows), left_out, name)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    return abn_page.pictures({"rows": without_reasons(rows)})


HOST_PART = Part("Host time of the layers", 1, partial(items, HOST), measure, partial(sections, "gpu_host"))
TITLE = "BN + ACT (+ CONV): time and memory of every strategy"
BLOCKS_PART = Part(TITLE, 7, partial(items, BLOCKS), measure, partial(sections, "gpu_abn"), pictures)
