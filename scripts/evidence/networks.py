"""Measure `recompute_activations` on known networks, beside other methods to train in less memory:

    python -m scripts.evidence.networks [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.networks only=[resnet50,densenet121] images=4 out=FILE.json
    python -m scripts.evidence.networks measure=false out=FILE.json

FILE.json is written again after each network: the same command continues a run that was stopped, and another `only`
adds networks to it. FILE.png shows bytes against time.
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from functools import partial

from matplotlib.figure import Figure

from scripts.evidence import frame, methods
from scripts.evidence.frame import mib, time_ratio
from scripts.evidence.methods import (
    BLOCKS,
    BUDGET,
    COMPILED,
    EXACT_IMAGES,
    ON_CPU,
    PLAIN,
    RECOMPUTED,
    NetworksArguments,
)
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns

Rows = dict[str, dict]  # of one network, by method

NAMED = (  # in the chart
    *("densenet121", "resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny"),
    *("vit_b_16", "maxvit_t"),
)

STYLES = {
    RECOMPUTED: (charts.BLUE, "o"),
    BLOCKS: (charts.VERMILION, "s"),
    ON_CPU: (charts.PURPLE, "D"),
    COMPILED: (charts.GREY, "^"),
    BUDGET: (charts.GREEN, "v"),
    PLAIN: (charts.BLACK, "P"),
}


def page(result: dict, name: str) -> str:
    networks = _by_network(result)
    rows = [row for of_network in networks.values() for row in of_network.values()]
    return methods.page_text(
        "networks",
        result,
        picture=f"![memory against time of every network and method]({name}.png)",
        networks=len(networks),
        summary=_summary(networks),
        comparison=_comparison(networks),
        every_network=columns(rows, [*COLUMNS, *(REPLAYS if any("replay_ms" in r for r in rows) else ())], left=2),
        exact_images=EXACT_IMAGES,
        exact_pixels=methods.EXACT_DEFAULT,
        larger=", ".join(f"{network}: {size}" for network, size in methods.EXACT_SIZE.items()),
    )


def _by_network(result: dict) -> dict[str, Rows]:
    return frame.grouped(result["rows"], ["network"], "method")


def _ratio(rows: Rows, method: str, kind: str) -> float:
    """Bytes relative to plain; NaN if they are not known."""
    return math.nan if rows[method][kind] is None else rows[method][kind] / rows[PLAIN][kind]


def _summary(networks: dict[str, Rows]) -> str:
    having = {method: [rows for rows in networks.values() if method in rows] for method in methods.METHODS[1:]}

    def bytes_(kind: str, method: str) -> str:
        return _range(_ratio(rows, method, kind) for rows in having[method])

    shown: Columns = [
        ("method", str),
        ("networks", lambda method: str(len(having[method]))),
        ("kept / plain", partial(bytes_, "kept_bytes")),
        ("peak / plain", partial(bytes_, "peak_bytes")),
        ("time / plain", lambda method: _range(time_ratio(rows, method, PLAIN).median for rows in having[method])),
    ]
    return columns(filter(having.get, having), shown)


def _comparison(networks: dict[str, Rows]) -> str:
    """Where `recompute_activations` is ahead of a rival, and where it is behind."""
    lines = []
    for rival in (BLOCKS, COMPILED, BUDGET):
        both = [rows for rows in networks.values() if {rival, RECOMPUTED} <= rows.keys()]
        if both:
            faster = sum(time_ratio(rows, RECOMPUTED, rival).median < 1 for rows in both)
            smaller = sum(_ratio(rows, RECOMPUTED, "kept_bytes") < _ratio(rows, rival, "kept_bytes") for rows in both)
            counts = f"faster in {faster} of {len(both)} networks, keeps less in {smaller}"
            lines.append(f"- *{RECOMPUTED}* beside *{rival}*: {counts}.")
    return "\n".join(lines)


def _range(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.2f} ({min(known):.2f} – {max(known):.2f})" if known else ""


def _bytes_to_plain(kind: str, row: dict) -> str:
    ratio = _ratio(row["beside"], row["method"], kind)
    return "1" if row["method"] == PLAIN else "" if math.isnan(ratio) else f"{ratio:.2f}"


COLUMNS: Columns = [
    ("network", lambda row: row["network"] if row["method"] == PLAIN else ""),
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"])),
    ("/ plain", partial(_bytes_to_plain, "kept_bytes")),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("/ plain", partial(_bytes_to_plain, "peak_bytes")),
    ("step, ms", lambda row: f"{statistics.median(row['times_ms']):.0f}"),
    ("/ plain", lambda row: frame.relative_time(row, PLAIN)),
    ("deviation", lambda row: f"{row['deviation']:.0e}" if "deviation" in row else ""),
    ("outputs", lambda row: {True: "equal", False: "differ", None: ""}[row.get("same_outputs")]),
]
REPLAYS: Columns = [("replayed, ms", lambda row: f"{row['replay_ms']:.1f}" if "replay_ms" in row else "")]


def pictures(result: dict) -> dict[str, Figure]:
    """Bytes against time, relative to plain: a point for each network and method."""
    networks = _by_network(result)
    figure, panels = charts.panels(1, 2, (14, 8), sharey=True)
    for axes, kind, title in zip(panels, ("kept_bytes", "peak_bytes"), ("kept bytes", "peak of a step"), strict=True):
        shown = []
        for method, (colour, style) in STYLES.items():
            places = {
                name: (ratio, time_ratio(rows, method, PLAIN).median)
                for name, rows in networks.items()
                if method in rows and not math.isnan(ratio := _ratio(rows, method, kind))
            }
            names = [name if name in NAMED and method == RECOMPUTED else "" for name in places]
            if places:
                x, y = zip(*places.values(), strict=True)
                shown.append(charts.Series(method, y, x, colour, style, names))
        charts.points(axes, shown, xlabel=f"{title}, relative to plain")
    panels[0].set(ylabel="time of a step, relative to plain")
    charts.legend(figure, columns=6)
    return {"": figure}


def measure(arguments: NetworksArguments, clock: frame.Clock) -> Iterator[dict]:
    yield from methods.each(arguments, clock, methods.NETWORKS, methods.measured)


run, main = frame.benchmark("networks", NetworksArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
