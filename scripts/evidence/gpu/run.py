"""Measure the items of a part one after the other, and make its page: the work of `scripts.gpu_evidence`."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from omegaconf import MISSING

from engine.distributed import device_of
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.frame import Clock
from scripts.evidence.gpu import check, fit, layers, networks, ranks, steps, train
from scripts.evidence.gpu.part import Part, Rows, Setting
from scripts.evidence.measuring import Elsewhere
from scripts.reports.markdown import section

PARTS: dict[str, Part] = {  # in the order in which they should be run
    "check": check.PART,
    "host": layers.HOST_PART,
    "exact": networks.EXACT_PART,
    "abn": layers.BLOCKS_PART,
    "networks": networks.PART,
    "steps": steps.PART,
    "fit": fit.PART,
    "train": train.PART,
    "ranks": ranks.PART,
}
REHEARSED = "Rehearsed on a CPU, on tiny tensors: no number on this page is a result."
NOT_STARTED = "not started"


@dataclass
class GpuArguments(frame.Arguments):
    out: str = MISSING  # DIR: for gpu_PART.json, its page and its picture
    measure: bool = True  # false: make page and picture from DIR/gpu_PART.json, without a GPU
    part: str = MISSING  # check, host, exact, abn, networks, steps, fit, train or ranks
    only: list[str] = field(default_factory=list)  # items of the part, or what their names begin with up to a slash
    camvid: str | None = None  # folder of CamVid, which part=train needs
    minutes: float = key(7.8, above=0)  # after which the item that is measured is stopped
    rehearse: bool = False  # on a CPU, on tiny tensors: every line runs, and nothing is measured

    def check(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"part={self.part}: expected one of {', '.join(PARTS)}")
        out = Path(self.out).resolve()
        if self.rehearse and frame.RESULTS in (out, *out.parents):
            raise ValueError(f"rehearse=true out={self.out}: docs/results has results alone; give another folder")

    def file(self) -> Path:
        return Path(self.out) / f"{'rehearsed' if self.rehearse else 'gpu'}_{self.part}.json"

    def known(self) -> dict[str, Any]:
        return {"part": self.part, "rehearse": self.rehearse}


def measured(arguments: GpuArguments, clock: Clock) -> Iterator[dict]:
    """Yield the record before the first item and after each. Items in the record of an earlier call are not repeated.

    Each item has rows in "items", or a reason in "left". An item that is being measured when the time is up ends.
    ValueError: there is no CUDA device, or no item of a name in `only`.
    """
    if not arguments.rehearse:
        device_of("cuda")
    own = frame.provenance()
    part, setting = PARTS[arguments.part], Setting(arguments.rehearse, arguments.camvid)
    items = part.items(setting)
    chosen = _chosen(items, arguments.only)
    before = frame.begun(arguments, own)
    done: dict[str, Rows] = before.get("items", {})
    left = {name: NOT_STARTED for name in items if name not in done}
    left |= {entry["item"]: entry["reason"] for entry in before.get("left", []) if entry["item"] in left}
    command = f"python -m scripts.gpu_evidence part={arguments.part}" + " rehearse=true" * arguments.rehearse

    def record() -> dict:
        return {
            "command": f"{command} out=DIR",
            "rehearsal": arguments.rehearse,
            "environment": {"commit": frame.commits(before, own)},
            "seconds": round(before.get("seconds", 0) + clock.seconds, 1),
            "left": [{"item": name, "reason": reason} for name, reason in left.items()],
            "items": {name: done[name] for name in items if name in done},
        }

    yield record()
    process: Elsewhere | None = None
    with _environment(setting), ExitStack() as stack:
        for name in [name for name in chosen if name in left]:
            seconds = 60 * arguments.minutes - clock.seconds
            if seconds <= 0:
                break
            process = process or stack.enter_context(Elsewhere(Measurement, arguments.part, setting))
            try:
                done[name] = process.call("measure", name, seconds)
                del left[name]
            except Exception as error:  # the other items can still be measured
                stack.close()  # the process's memory may hold what the error refers to
                process = None
                left[name] = "stopped" if isinstance(error, BrokenProcessPool) else frame.reason(error)
            clock.report(f"{name}: {left.get(name, 'done')}")
            yield record()


def _chosen(items: Iterable[str], only: Iterable[str]) -> list[str]:
    """The items that `only` names, all if it is empty. ValueError: it names none."""
    names = list(items)
    for given in only:
        if not any(f"{name}/".startswith(f"{given}/") for name in names):
            raise ValueError(f"only={given}: expected some of {', '.join(names)}")
    return [name for name in names if not only or any(f"{name}/".startswith(f"{given}/") for given in only)]


def _environment(setting: Setting) -> AbstractContextManager:
    """Context with the environment of the processes that measure."""
    # Deterministic algorithms need the first; the second hides the profiler's log.
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "KINETO_LOG_LEVEL": "99"}
    return patch.dict(os.environ, wanted | ({"TRITON_INTERPRET": "1"} if setting.rehearse else {}))


class Measurement:
    """The object in the process that measures (see `Elsewhere`)."""

    def __init__(self, part: str, setting: Setting):
        self.part, self.setting = PARTS[part], setting
        self.items = self.part.items(setting)
        if setting.rehearse:
            torch.set_num_threads(1)

    def measure(self, item: str, seconds: float) -> Rows:
        """The rows of an item. The process ends if they take longer."""
        alarm = threading.Timer(seconds, os._exit, [1])
        alarm.daemon = True
        alarm.start()
        try:
            return self.part.measure(self.setting, *self.items[item])
        finally:
            alarm.cancel()
            torch.compiler.reset()
            if self.setting.device == "cuda":
                torch.cuda.empty_cache()


def rows_of(record: dict) -> Rows:
    return [row for rows in record["items"].values() for row in rows]


def page(record: dict, name: str) -> str:
    part = PARTS[record["arguments"]["part"]]
    rows = rows_of(record)
    sections = [*(part.sections(rows) if rows else ())]
    if rows and not any(f"{name}.png" in text for text in sections) and part.pictures(rows):
        sections.insert(0, f"![{part.title}]({name}.png)")
    if record["left"]:
        lines = [f"- {entry['item']}: {entry['reason']}" for entry in record["left"]]
        sections.append(section("Not measured", "\n".join(lines)))
    rehearsal = f"**{REHEARSED}**" if record["rehearsal"] else ""
    return frame.page_text("gpu", record, title=part.title, rehearsal=rehearsal, sections=sections)


def pictures(record: dict) -> Mapping[str, Figure]:
    rows = rows_of(record)
    found = PARTS[record["arguments"]["part"]].pictures(rows) if rows else {}
    if record["rehearsal"]:
        for figure in found.values():
            centred: dict = {"ha": "center", "va": "center", "rotation": 20}
            figure.text(0.5, 0.5, "REHEARSAL", fontsize=60, color="red", alpha=0.4, **centred)
    return found
