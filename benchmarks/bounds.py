"""Compare the plans of known networks within budgets with a lower bound on the time of all plans:

    python -m benchmarks.bounds out=FILE.json
    python -m benchmarks.bounds only=[resnet50] out=FILE.json
    python -m benchmarks.bounds only=[smp/FPN-resnet50,deeplabv3_resnet50] out=FILE.json

Nothing is computed: bytes and the times of operators are estimated on fake tensors.
"""

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks import frame, zoo
from benchmarks.least_seconds import bounds_of
from benchmarks.rows import Rows
from keepless import plan
from keepless.torch_internals import FakeTensorMode
from scripts.reports.markdown import table

NETWORKS = (
    *("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "smp/Unet-resnet34", "smp/FPN-resnet50"),
    "deeplabv3_resnet50",
)
IMAGES, SIDE = 8, 224  # per step; pixels
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the baseline's peak
EASY = 0.5  # budgets from here on


def measure(arguments: frame.Arguments, name: str) -> Rows:
    """{"network", "share": of the baseline's peak, "time", "bound": shares of a step, "seconds": to find all bounds}"""
    with FakeTensorMode():
        network = zoo.build(name, SIDE)
        inputs = torch.randn(IMAGES, 3, SIDE, SIDE)
        plans = plan(network, inputs, [*SHARES, 1.0])
        began = time.process_time()
        bounds = bounds_of(network, inputs, plans.rows)
        seconds = round((time.process_time() - began) / len(plans.rows), 2)
    common = {"network": name, "seconds": seconds}
    rows = {}
    for row, bound in zip(plans.rows[:-1], bounds, strict=False):
        share = round((row.budget + plans.gradients) / plans.plain, 3)  # budgets are beside gradients that come
        rows[share] = {**common, "share": share, "time": row.seconds, "bound": bound}
    return [*rows.values()]


def heading(arguments: dict) -> tuple[str, str]:
    conditions = f"Estimated on fake tensors; {IMAGES} images of {SIDE}x{SIDE} per step"
    return "Plans, and the bound of all plans", conditions


def sections(call: dict, _: str) -> Iterator[str]:
    rows = []
    for name, plan_rows in call["items"].items():
        cells = dict.fromkeys(SHARES, "")
        for row in plan_rows if "share" in plan_rows[0] else []:
            bound = "–" if row["bound"] is None else f"{100 * row['bound']:.1f}"
            cells[row["share"]] = f"{100 * row['time']:.1f}, {bound}"
        rows.append([name, *cells.values(), f"{plan_rows[0].get('seconds', '')}"])
    yield (
        "Time to recompute within a share of the baseline's peak, in % of a step, and the time below which no plan is. "
        "Empty: no plan reaches it; –: no bound, or one that says little. *seconds*: of processor time, to find one "
        "bound."
    )
    yield table(["network", *(f"{share:.1f}" for share in SHARES), "seconds"], rows)
    easy_rows = [row for row in frame.rows_of(call) if row.get("bound") is not None and row["share"] >= EASY]
    gaps = [100 * (row["time"] - row["bound"]) for row in easy_rows]
    if gaps:
        middle = statistics.median(gaps)
        yield f"From {EASY} on, plans are {middle:.2f} % of a step above the bound (median), at most {max(gaps):.1f} %."


BENCHMARK = frame.Benchmark(
    "bounds", frame.Arguments, lambda _: {name: (name,) for name in NETWORKS}, measure, heading, sections
)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
