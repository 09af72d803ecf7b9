"""What `recompute_activations` saves and costs in known networks, beside other methods to train in less memory:

    python -m scripts.bench_networks [device=cpu|cuda] [only=[resnet50,…]] out=FILE.json

Writes FILE.json, FILE.md (targets, tables) and FILE.png (bytes against time). FILE.json is written again after each
network: the same command continues a run that was stopped, and another `only` adds networks to it. `measure=false`
makes the page again from FILE.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.distributed import device_of
from engine.schema.keys import key
from scripts.bench import frame
from scripts.bench.elsewhere import Elsewhere
from scripts.bench.networks_list import NETWORKS, PACKAGES, chosen, installed, package_of
from scripts.bench.networks_methods import ALL, Measurement
from scripts.bench.networks_page import chart, markdown
from scripts.bench.resuming import begun, commits, environment_with


@dataclass
class NetworksArguments(frame.Arguments):
    """Arguments of the benchmark."""

    device: str = key("cpu", one_of=("cpu", "cuda"))
    threads: int = key(1, above=0)
    rounds: int = key(5, above=0)
    images: int = key(8, least=2)  # per step; some norms have one value per image
    image_size: int = key(224, above=0)  # pixels
    compiler: str | None = "inductor"  # of torch.compile; null compiles nothing
    only: list[str] = field(default_factory=list)  # networks; empty: all

    def check(self) -> None:
        """Raise ValueError for an impossible argument."""
        device_of(self.device)
        chosen(self.only)


def measure(arguments: NetworksArguments, clock: frame.Clock) -> Iterator[dict]:
    """Measure one network after the other; yield the record so far after each.

    Networks in the record of an earlier call are not measured again, unless even the plain network failed.
    """
    environment = environment_with(PACKAGES.values())
    before = begun(arguments, environment)
    rows = before.get("rows", [])
    done = {row["network"] for row in rows}
    left_out = [entry for entry in before.get("left_out", []) if entry["network"] in done]
    environment |= {"threads": arguments.threads, "commit": commits(before, environment)}

    def record() -> dict:
        seconds = round(before.get("seconds", 0) + clock.seconds, 1)
        in_order = sorted(rows, key=lambda row: NETWORKS.index(row["network"]))
        return {"environment": environment, "seconds": seconds, "rows": in_order, "left_out": left_out}

    for name in chosen(arguments.only):
        if name in done:
            continue
        if not installed(name):
            left_out.append({"network": name, "method": ALL, "reason": f"{package_of(name)} is not installed"})
            continue
        try:
            measured = measured_alone(name, arguments)
        except Exception as error:  # e.g. out of memory: the other networks can still be measured
            measured = [], [{"network": name, "method": ALL, "reason": frame.reason(error)}]
        rows += measured[0]
        left_out += measured[1]
        clock.report(name)
        yield record()
    yield record()


def measured_alone(name: str, arguments: NetworksArguments) -> tuple[list[dict], list[dict]]:
    """See `networks_methods.measured`. The network has a process to itself, whose memory is free afterwards."""
    given = (arguments.device, arguments.images, arguments.image_size, arguments.rounds, arguments.compiler)
    with Elsewhere(Measurement, arguments.threads) as process:
        return process.call("of", name, *given)


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw its chart to `picture`."""
    chart(result["rows"]).savefig(picture, dpi=110)
    return markdown(result, picture.name)


run, main = frame.benchmark("bench_networks", NetworksArguments, measure, page)
