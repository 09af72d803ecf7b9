"""Measure BN + ACT (+ CONV): `python -m scripts.bench_abn [device=cpu|cuda] out=FILE.json`.

Writes FILE.json, and from it FILE.md (targets, tables) and FILE.png (a chart like the paper's Figure 4).
`measure=false` makes the page and the chart again from a FILE.json.
"""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from engine.command_line import configured
from scripts.records import record

from .arguments import Benchmark, with_defaults
from .benchmark import measure
from .page import page_of


def run(values: DictConfig) -> Path:
    """Measure, write everything; returns the path of the page. Raises ValueError for impossible arguments."""
    return record(values, lambda: measure(with_defaults(OmegaConf.to_object(values))), page_of)


@configured("bench_abn", Benchmark)
def main(values: DictConfig) -> None:
    print(run(values))


if __name__ == "__main__":
    main()
