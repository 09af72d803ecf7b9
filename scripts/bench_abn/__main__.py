"""Measure BN + ACT (+ CONV): `python -m scripts.bench_abn [device=cpu|cuda] out=FILE.json`.

Writes FILE.json, and from it FILE.md (targets, tables) and FILE.png (a chart like the paper's Figure 4).
`measure=false` makes the page and the chart again from a FILE.json.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from engine import config as configuration
from engine.command_line import errors_for_users
from scripts.records import record

from .arguments import Benchmark, with_defaults
from .benchmark import measure
from .page import page_of


def run(values: DictConfig) -> Path:
    """Measure, write everything; returns the path of the page. Raises ValueError for impossible arguments."""
    return record(values, lambda: measure(with_defaults(OmegaConf.to_object(values))), page_of)


configuration.register("abn_benchmark", Benchmark)


@hydra.main(version_base="1.3", config_path="../../configs", config_name="bench_abn")
def main(values: DictConfig) -> None:
    with errors_for_users():
        print(run(values))


if __name__ == "__main__":
    main()
