"""The page of a record, made from the JSON file alone: targets, tables, method."""

import statistics

from scripts.records import MISS, NOT_MEASURED, PASS, opening, target_lines

from .benchmark import JPEG, JPEG_BASE, PNG
from .pipelines import DECODES, OURS, RIVALS

# What the targets are about: at other sizes they are neither reached nor missed.
_REQUIRED = {"png_size": [1024, 2048], "jpeg_size": [3648, 5472], "crop_size": 872, "files": 18000}

Times = dict[str, list[float]]  # of one source, by pipeline

METHOD = """
- A sample is one pair of files, in the page cache, made into a crop of uint8 tensors, image (3, h, w) and label (h, w)
  of train ids, by one thread. In each round every pipeline makes the crop of the same key (scale 0.7 to 2.0, place,
  flip), in a new random order. Times are medians over the rounds, samples per second those of the median time.
- Pipelines are compared by the ratio of their times in the same round, that is for the same crop: its median over the
  rounds, with quartiles. It is not the quotient of two medians in the table, as these may belong to crops of very
  different cost. Throughput to that of a rival is the rival's time to ours. The targets are judged by the decoder and
  by the rival with the least time to ours.
- The files are drawn streets, enlarged, with grain like that of photographs: PNGs as Cityscapes has them; JPEGs
  (quality 90, 4:2:0) with palette PNGs as labels, as Vistas has them. JPEGs are measured at their own size, to which
  the targets apply, and with the `base_size` of `configs/data/vistas.yaml`, where a rival resizes to fewer pixels.
- *Ours* is `datasets.TrainingCrops`. It knows its crop before it decodes, and decodes the files only down to the crop's
  last row: PNG and JPEG are stored from the top. So it can take less time than the bare decode.
- *Bare decode* gives the pixels of both whole files and nothing else. Only Pillow gives the indices of a palette PNG,
  so all use it for those labels.
- The rivals resize whole images (bilinear) and labels (nearest), then crop, pad, flip. They map train ids in the crop
  alone. `transforms.v2` decodes with torchvision; with its default, antialiasing, it smooths images that shrink. Its
  labels are plain tensors: a `Mask` is resized without the half-pixel offset, and so shifted against its image.
- The class index reads a whole label, counts its classes and samples pixels of each; it is made once.
- Memory is that of a DataLoader's worker, of pages that no other process has (`Private_*` in
  `/proc/PID/smaps_rollup`), looked at every 2 ms while it makes minibatches of four crops, over a worker that was not
  asked for any.
- A start is that of a new process after its imports: list and pair the files of a Vistas tree, look whether they were
  verified, load the class index, draw the first keys. The first start verifies them and makes the index, on pictures
  of 32x24 pixels: on real ones it takes as long as decoding all labels twice.
"""


def markdown(result: dict) -> str:
    """The page."""
    arguments = result["arguments"]
    about = (
        f"Crops of {arguments['crop_size']} pixels, {arguments['rounds']} rounds over {arguments['pictures']} pictures "
        f"of each kind"
    )
    lines = [*opening("Speed of the training crops", result, about), "", *target_lines(targets(result))]
    for source, times in by_source(result["rows"]).items():
        lines += ["", f"## {_title(source, result)}", ""]
        lines += [
            "| pipeline | ms | samples/s per core | time to bare decode | time to ours |",
            "|---|---:|---:|---:|---:|",
        ]
        limit = fastest(times, DECODES)
        for row in result["rows"]:
            if row["source"] == source:
                own = times[row["pipeline"]]
                ratios = [_spread(own, times[name]) if row["pipeline"] != name else "1" for name in (limit, OURS)]
                numbers = [f"{row['median_ms']:.1f}", f"{1e3 / row['median_ms']:.1f}"]
                lines.append("| " + " | ".join([row["pipeline"], *numbers, *ratios]) + " |")
    lines += ["", "## Class index", "", "| source | a label read and indexed, ms |", "|---|---:|"]
    lines += [f"| {source} | {statistics.median(ms):.1f} |" for source, ms in result["index_ms"].items()]
    lines += [
        "",
        "## Memory of a worker",
        "",
        "| source | idle, MiB | peak, MiB | afterwards, MiB |",
        "|---|---:|---:|---:|",
    ]
    for source, mib in result["memory_mib"].items():
        lines.append(f"| {source} | {mib['idle']:.0f} | {mib['peak']:.0f} | {mib['after']:.0f} |")
    lines += ["", f"## Start with {arguments['files']} images", "", "| | first, s | cached, s |", "|---|---:|---:|"]
    for part, first in result["first_start_s"].items():
        cached = statistics.median(start[part] for start in result["cached_starts_s"])
        lines.append(f"| {part} | {first:.2f} | {cached:.2f} |")
    lines += ["", "## How it was measured", METHOD.strip("\n")]
    return "\n".join(lines) + "\n"


def targets(result: dict) -> list[tuple[str, str, str, str]]:
    """(about, to reach, measured, verdict) of each target."""
    sources = by_source(result["rows"])
    found = []
    for source, limit in ((PNG, 1.20), (JPEG, 1.10)):
        times = sources[source]
        ratio = paired(times[OURS], times[fastest(times, DECODES)])
        about = f"{source}: time to that of the bare decode"
        found.append((about, f"at most {limit:.2f}", f"{ratio:.2f}", ratio <= limit))
    for source, limit in ((PNG, 1.1), (JPEG, 1.8)):
        times = sources[source]
        rival = fastest(times, RIVALS)
        ratio = paired(times[rival], times[OURS])
        about = f"{source}: throughput to that of the fastest rival"
        found.append((about, f"at least {limit}", f"{ratio:.2f} ({rival})", ratio >= limit))
    index_ms = statistics.median(result["index_ms"][PNG])
    found.append(("PNG: a label read and indexed", "at most 30 ms", f"{index_ms:.1f} ms", index_ms <= 30))
    added = max(mib["peak"] - mib["idle"] for mib in result["memory_mib"].values())
    found.append(("JPEG: unique memory that a worker adds", "at most 400 MiB", f"{added:.0f} MiB", added <= 400))
    start_s = statistics.median(sum(parts.values()) for parts in result["cached_starts_s"])
    about = f"start with {result['arguments']['files']} images, cached"
    found.append((about, "under 2 s", f"{start_s:.2f} s", start_s < 2))
    as_required = all(result["arguments"][name] == value for name, value in _REQUIRED.items())
    words = {True: PASS, False: MISS} if as_required else {}
    return [
        (about, to_reach, measured, words.get(reached, NOT_MEASURED)) for about, to_reach, measured, reached in found
    ]


def by_source(rows: list[dict]) -> dict[str, Times]:
    """The times of each source's pipelines."""
    sources: dict[str, Times] = {}
    for row in rows:
        sources.setdefault(row["source"], {})[row["pipeline"]] = row["times_ms"]
    return sources


def fastest(times: Times, among: tuple[str, ...]) -> str:
    """The pipeline with the least time to ours."""
    return min(among, key=lambda name: paired(times[name], times[OURS]))


def paired(times: list[float], others: list[float]) -> float:
    """Median over the rounds of a time in that of another pipeline."""
    return statistics.median(own / other for own, other in zip(times, others, strict=True))


def _spread(times: list[float], others: list[float]) -> str:
    ratios = [own / other for own, other in zip(times, others, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{statistics.median(ratios):.2f} ({lower:.2f} – {upper:.2f})"


def _title(source: str, result: dict) -> str:
    """The source with its size, and the bytes of its files."""
    kind = PNG if source == PNG else JPEG
    height, width = result["arguments"]["png_size" if kind == PNG else "jpeg_size"]
    size = f"{source}={result['arguments']['base_size']}" if source == JPEG_BASE else source
    kib = {name: bytes_ / 1024 for name, bytes_ in result["bytes_per_file"][kind].items()}
    return f"{size}: {width}x{height} pixels, files of {kib['image']:.0f} KiB, labels of {kib['label']:.0f} KiB"
