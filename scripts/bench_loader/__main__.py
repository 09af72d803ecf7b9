"""Measure the training crops: `python -m scripts.bench_loader out=FILE.json`.

Writes FILE.json, and from it FILE.md (targets, tables). `measure=false` makes the page again from a FILE.json.
"""

from pathlib import Path

from omegaconf import DictConfig

from engine import config as configuration
from engine.command_line import configured
from scripts.records import record

from .benchmark import LoaderBenchmark, measure
from .page import markdown


def run(values: DictConfig) -> Path:
    """Measure, write both files; returns the path of the page. Raises ValueError for impossible arguments."""
    return record(values, lambda: measure(configuration.typed(values)), lambda result, _: markdown(result))


@configured("bench_loader", LoaderBenchmark)
def main(values: DictConfig) -> None:
    print(run(values))


if __name__ == "__main__":
    main()
