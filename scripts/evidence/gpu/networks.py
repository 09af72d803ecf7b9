"""Parts "exact" and "networks": `recompute_activations` on torchvision's networks and on a decoder."""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from keepless import plan, recompute_activations
from scripts.evidence import methods
from scripts.evidence.frame import mib, prose, reason, time_ratio
from scripts.evidence.gpu.decoder import VOCABULARY, Decoder
from scripts.evidence.gpu.part import Part, Rows, Setting, bars, beside, relative, relative_text, without_reasons
from scripts.evidence.measuring import PRECISIONS, autocast, peak_bytes, timed
from scripts.evidence.methods import BLOCKS, PLAIN, RECOMPUTED, deviation, gradients_of, mean_squares
from scripts.evidence.networks_budget import Trained, training_step
from scripts.reports.markdown import Columns, columns, section

DECODER = "llama-like"
EXACT = ("resnet50", "densenet121", "convnext_tiny", DECODER)
MEASURED = ("resnet50", "densenet121", "convnext_tiny", "efficientnet_v2_s", "vit_b_16", DECODER)
REHEARSED = ("squeezenet1_1", DECODER)
SHARES = (0.3, 0.15)  # of the plain network's peak
FLOAT64 = "float64"
WARM_UP_STEPS = 2  # after which a budget has its plan


def build(name: str, setting: Setting, images: int, size: int) -> tuple[nn.Module, Tensor]:
    """A network with random weights on the device, and a minibatch; for the decoder of `images` texts."""
    torch.manual_seed(0)
    if name == DECODER:
        width, heads, depth, length = (32, 2, 2, 16) if setting.rehearse else (768, 12, 12, 1024)
        network: nn.Module = Decoder(width, heads, depth)
        inputs = torch.randint(VOCABULARY, (images, length))
    else:
        network = methods.random_network(name, size)
        inputs = torch.randn(images, 3, size, size)
    return network.to(setting.device), inputs.to(setting.device)


def exact_items(setting: Setting) -> dict[str, tuple]:
    return {name: (name,) for name in (REHEARSED if setting.rehearse else EXACT)}


def measure_exact(setting: Setting, name: str) -> Rows:
    """A row for each precision, with deterministic algorithms and without, and each method.

    {"network", "precision", "deterministic", "method", "deviation": largest of a gradient from the plain network's,
    relative to the largest gradient; "error": the same from the plain network's in float64; "same_outputs"}. The first
    method is the plain network once more: what it differs by is not recomputation.
    """
    double, inputs = build(name, setting, *((2, 64) if setting.rehearse else (8, 64)))
    double = double.double()
    precise = _gradients(double, _as(inputs, torch.float64), setting, FLOAT64)[0]
    single = copy.deepcopy(double).float()
    del double
    rows = []
    for precision in (FLOAT64, *PRECISIONS):
        dtype = torch.float64 if precision == FLOAT64 else torch.float32
        network, given = copy.deepcopy(single).to(dtype), _as(inputs, dtype)
        for deterministic in (False, True):
            with _arithmetic(deterministic):
                gradients, outputs = _gradients(network, given, setting, precision)
                for method, prepare in _exact_methods(setting).items():
                    row: dict = {"network": name, "precision": precision}
                    row |= {"deterministic": deterministic, "method": method}
                    try:
                        own = _gradients(prepare(copy.deepcopy(network)), given, setting, precision)
                    except Exception as error:  # e.g. an operator that is never deterministic
                        rows.append({**row, "reason": reason(error)})
                        continue
                    row["deviation"] = deviation(own[0].double(), gradients.double())
                    row["error"] = deviation(own[0].double(), precise)
                    rows.append({**row, "same_outputs": torch.equal(own[1], outputs)})
    return rows


def _as(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _exact_methods(setting: Setting) -> dict[str, Callable[[nn.Module], nn.Module]]:
    shares = (0.5,) if setting.rehearse else (0.5, SHARES[0])
    budgets = {_budget(share): partial(recompute_activations, budget=share) for share in shares}
    return {PLAIN: lambda network: network, RECOMPUTED: recompute_activations, **budgets}


def _gradients(network: nn.Module, inputs: Tensor, setting: Setting, precision: str) -> tuple[Tensor, Tensor]:
    """Gradients and outputs of the step in which a budget has its plan; always with the same random numbers."""
    states = [buffer.clone() for buffer in network.buffers()]
    for _ in range(WARM_UP_STEPS + 1):
        with torch.no_grad():
            for buffer, state in zip(network.buffers(), states, strict=True):
                buffer.copy_(state)
        torch.manual_seed(0)
        with autocast(setting.device, precision):
            outputs = network(inputs)
        gradients = gradients_of(network, mean_squares(outputs))
    return gradients, outputs.detach()


@contextmanager
def _arithmetic(deterministic: bool) -> Iterator[None]:
    """Context without tf32, in which all or no algorithms are deterministic."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=deterministic, allow_tf32=False):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


EXACTNESS: Columns = [
    ("network", "{network}"),
    ("precision", "{precision}"),
    ("deterministic", lambda row: "yes" if row["deterministic"] else "no"),
    ("method", lambda row: f"{PLAIN}, again" if row["method"] == PLAIN else row["method"]),
    ("from plain", lambda row: row.get("reason") or f"{row['deviation']:.0e}"),
    ("from float64", lambda row: "" if "reason" in row else f"{row['error']:.0e}"),
    ("outputs", lambda row: {True: "equal", False: "differ", None: ""}[row.get("same_outputs")]),
]


def exact_sections(rows: Rows) -> Iterator[str]:
    worst = [
        f"- {precision}, {'deterministic' if deterministic else 'default'} algorithms: {most:.0e} from plain"
        + ("." if precision == FLOAT64 else f", and the error to float64 is at most {ratio:.2f} times plain's.")
        for precision, deterministic, most, ratio in _worst(rows)
    ]
    yield section("Gradients", prose("gpu/exact"), "\n".join(worst), columns(rows, EXACTNESS, left=4))


def _worst(rows: Rows) -> Iterator[tuple[str, bool, float, float]]:
    """The largest deviation of our methods, and of their error's ratio to plain's, by precision and determinism."""
    known = without_reasons(rows)
    for precision, deterministic in dict.fromkeys((row["precision"], row["deterministic"]) for row in known):
        own = [row for row in known if (row["precision"], row["deterministic"]) == (precision, deterministic)]
        plain = {row["network"]: max(row["error"], 1e-18) for row in own if row["method"] == PLAIN}
        ours = [row for row in own if row["method"] != PLAIN]
        if ours:
            ratio = max(row["error"] / plain[row["network"]] for row in ours if row["network"] in plain)
            yield precision, deterministic, max(row["deviation"] for row in ours), ratio


def items(setting: Setting) -> dict[str, tuple]:
    names, precisions = (REHEARSED, PRECISIONS[1:]) if setting.rehearse else (MEASURED, PRECISIONS[::-1])
    return {f"{name}/{precision}": (name, precision) for precision in precisions for name in names}


def measure(setting: Setting, name: str, precision: str) -> Rows:
    """A row for each method: {"network", "method", "peak_bytes", "planned_bytes": of budgets, "times_ms"}.

    The loss is in the network, so that plans count it. Peaks are those of the third step, when a budget has its plan.
    """
    images = 2 if setting.rehearse else 16 if name == DECODER else 128
    network, inputs = build(name, setting, images, 64 if setting.rehearse else 224)
    plain, device = Trained(network), setting.device
    with autocast(device, precision):
        planned = plan(copy.deepcopy(plain), inputs, [*SHARES, 1.0])
    steps: dict[str, Callable[[], object]] = {}
    budgets = {_budget(share): share for share in SHARES}

    def start(method: str) -> dict:
        trained, row = copy.deepcopy(plain), {}
        if method in budgets:
            limit = int(budgets[method] * planned.plain)
            row["planned_bytes"] = next((r.peak for r in planned.rows if r.budget == limit), planned.least)
            recompute_activations(trained, budget=budgets[method])
        else:
            methods.forward_of(trained.network, method)
        step = partial(training_step, trained, partial(_forward, trained, device, precision), inputs)
        for _ in range(WARM_UP_STEPS):
            step()
        row["peak_bytes"] = peak_bytes(step, device)
        steps[method] = step
        return row

    network_name = f"{name}, {precision}"
    rows, left_out = methods.each_method(network_name, (PLAIN, RECOMPUTED, *budgets, BLOCKS), start)
    times_ms = timed(steps, setting.rounds(10), device)
    found = ({"method": method, **row, "times_ms": times_ms[method]} for method, row in rows.items())
    return [*({"network": network_name, **row} for row in found), *left_out]


def _budget(share: float) -> str:
    return f"budget {share}"


def _forward(trained: Trained, device: str, precision: str, inputs: Tensor) -> Tensor:
    with autocast(device, precision):
        return trained(inputs)


def _peak(row: dict) -> float:
    return row["peak_bytes"]


def _time(row: dict) -> float | None:
    """The time to the plain network's."""
    return time_ratio(row["beside"], row["method"], PLAIN).median if PLAIN in row["beside"] else None


def off_plan(row: dict) -> float | None:
    """The measured peak over the planned one, minus one."""
    return row["peak_bytes"] / row["planned_bytes"] - 1 if "planned_bytes" in row else None


COLUMNS: Columns = [
    ("network", "{network}"),
    ("method", "{method}"),
    ("planned, MiB", lambda row: mib(row.get("planned_bytes"))),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("off plan", lambda row: "" if off_plan(row) is None else f"{off_plan(row):+.1%}"),
    ("/ plain", lambda row: relative_text(row, PLAIN, _peak)),
    ("step, ms", lambda row: f"{statistics.median(row['times_ms']):.1f}"),
    ("/ plain", lambda row: "" if _time(row) is None else f"{_time(row):.2f}"),
]


def sections(rows: Rows) -> Iterator[str]:
    found = beside(rows, "method", "network")
    lines = []
    for precision in reversed(PRECISIONS):
        own = [row for row in found if row["network"].endswith(precision) and row["method"] == RECOMPUTED]
        if times := [time for time in map(_time, own) if time is not None]:
            lines.append(f"- {RECOMPUTED}, {precision}: {statistics.median(times):.2f} of a plain step (median).")
    if off := [abs(value) for row in found if (value := off_plan(row)) is not None]:
        lines.append(f"- Measured peaks of {len(off)} plans are within {max(off):.1%} of the planned ones.")
    lines += [f"- {row['network']}, {row['method']}: {row['reason']}." for row in rows if "reason" in row]
    yield section("Peak, plan and time", prose("gpu/networks"), "\n".join(lines), columns(found, COLUMNS, left=2))


def pictures(rows: Rows) -> Mapping[str, Figure]:
    values = {"peak / plain": lambda row: relative(row, PLAIN, _peak), "time / plain": _time}
    return bars(beside(rows, "method", "network"), "network", "method", values)


EXACT_PART = Part("Recomputed gradients", 4, exact_items, measure_exact, exact_sections)
PART = Part("Networks in less memory", 7, items, measure, sections, pictures)
