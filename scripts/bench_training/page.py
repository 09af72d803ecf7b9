"""The page of a record, made from the JSON file alone: targets, tables, method."""

import statistics

from scripts.records import MISS, NOT_MEASURED, PASS, opening, target_lines

from .switches import COMPILED, DEFAULT

MIB = 2**20
STEP_MS = (100, 300)  # of the bare loop, for its overhead to be judged as that of a 200 ms step
GRAPHS = {switch.name: switch.graphs for switch in COMPILED if switch.compiled}

METHOD = """
- A step is `engine.loop.train_step` as `train_seg.py` calls it, on 4 minibatches of crops of drawn street scenes that
  are in memory, one after the other, again and again. Every switch is a training in a process of its own. In each round
  every process takes one step while the others wait, in a new random order; the whole is started anew several times,
  as the place of buffers in memory differs by process. Times are medians over all rounds; ratios are medians of the
  ratios to the default within a round, with those of each start in brackets. A training whose steps take more
  than five seconds takes part in the first two rounds only.
- *Saved* is what autograd keeps of one part of a minibatch for its backward pass, parameters aside. *Peak* is the most
  that tensors of a step take at any moment beyond what was there before it: weights, gradients of the step before and
  momentum. *Process* is the largest resident size of the whole process, with Python and PyTorch, in the first start.
- The *first step* of each start includes compilation, except of kernels that the compiler's cache on disk already has.
- The *loss* is the mean over the 4 minibatches in steps 2 to 5. Initial weights and minibatches are the same for all.
  float16 leaves its first steps out, until its loss scale fits, so that its loss is that of fewer steps.
- The *overhead* is that of `engine.loop.train` with its report (progress bar, metrics.jsonl, TensorBoard) over forward
  pass, loss, backward pass and optimiser step, on images that are normalised already. Both train the same network in
  one process, in turns of some steps; every turn writes a record, where a run does so every 20 steps.
"""


def markdown(result: dict) -> str:
    """The page."""
    arguments = result["arguments"]
    about = (
        f"{arguments['recipe'] or 'the default network'}, minibatches of {arguments['crops']} crops of "
        f"{arguments['crop_size']} pixels in float32, {arguments['rounds']} rounds in each of {arguments['starts']} "
        f"starts"
    )
    lines = opening("Speed of training steps", result, about)
    if judged := targets(result):
        lines += ["", *target_lines(judged)]
    if result["rows"]:
        lines += ["", "## Switches", "", *switches(result)]
    lines += ["", "## How it was measured", METHOD.strip("\n")]
    return "\n".join(lines) + "\n"


def targets(result: dict) -> list[tuple[str, str, str, str]]:
    """(about, to reach, measured, verdict) of each target."""
    return [*_overhead(result["overhead_ms"]), *_compiled(result["rows"])]


def _overhead(times_ms: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    about, to_reach = "time of the training loop to bare steps", "at most 1.03 of a step of about 200 ms"
    if not times_ms:
        return []
    bare_ms = statistics.median(times_ms["bare"])
    ratios = [real / bare for real, bare in zip(times_ms["real"], times_ms["bare"], strict=True)]
    ratio, (lower, _, upper) = statistics.median(ratios), _quartiles(ratios)
    measured = f"{ratio:.3f} ({lower:.3f} – {upper:.3f}) of {bare_ms:.0f} ms, {len(ratios)} rounds"
    if not STEP_MS[0] <= bare_ms <= STEP_MS[1]:
        return [(about, to_reach, measured, NOT_MEASURED)]
    return [(about, to_reach, measured, PASS if ratio <= 1.03 else MISS)]


def _compiled(rows: list[dict]) -> list[tuple[str, str, str, str]]:
    """One target for each training under torch.compile."""
    judged = []
    for row in rows:
        if row["switch"] not in GRAPHS:
            continue
        limit = GRAPHS[row["switch"]]
        graphs = f"{row['graphs']} graph" + "s" * (row["graphs"] != 1)
        later = row["graphs"] - row["graphs_warm"]
        reached = row["graphs"] <= limit and not row["graph_breaks"] and not later
        judged.append(
            (
                f"`{row['switch']}`",
                f"{limit} graph{'s' * (limit != 1)}, no break, none made again",
                f"{graphs}, {row['graph_breaks']} breaks, {later} made again; first step "
                f"{' and '.join(f'{seconds:.0f} s' for seconds in row['first_step_s'])}",
                PASS if reached else MISS,
            )
        )
    return judged


def switches(result: dict) -> list[str]:
    """The table of switches."""
    lines = [
        "| switch | step, ms | time to default | saved, MiB | peak, MiB | process, MiB | loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    default = next(row for row in result["rows"] if row["switch"] == DEFAULT)
    for row in result["rows"]:
        median_ms = statistics.median(ms for times in row["times_ms"] for ms in times)
        memory = (row["saved_bytes"] / MIB, row["peak_bytes"] / MIB, row["process_mib"][0])
        numbers = [f"{median_ms:.0f}", "1" if row is default else spread(row, default)]
        numbers += [f"{mib:.1f}" for mib in memory[:2]] + [f"{memory[2]:.0f}", f"{row['loss']:.4f}"]
        lines.append("| " + " | ".join([code(row["switch"]), *numbers]) + " |")
    for entry in result["left_out"]:
        lines.append(f"| {code(entry['switch'])} | not measured: {entry['reason']} | | | | | |")
    return lines


def spread(row: dict, default: dict) -> str:
    """`ratio`, and in brackets those of each start where there are several."""
    medians = [
        ratio({"times_ms": [ours]}, {"times_ms": [others]})
        for ours, others in zip(row["times_ms"], default["times_ms"], strict=True)
    ]
    overall = f"{ratio(row, default):.2f}"
    return f"{overall} ({', '.join(f'{median:.2f}' for median in medians)})" if len(medians) > 1 else overall


def ratio(row: dict, default: dict) -> float:
    """Median over the rounds of all starts of a training's time in the default's; a slow one is in fewer rounds."""
    starts = zip(row["times_ms"], default["times_ms"], strict=True)
    return statistics.median(ours / other for times in starts for ours, other in zip(*times, strict=False))


def code(name: str) -> str:
    """A switch as the tables show it."""
    return f"`{name}`" if "=" in name else name


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
