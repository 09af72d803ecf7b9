"""Measure BN + ACT (+ CONV): `python -m scripts.bench_abn [device=cpu|cuda] out=FILE.json`.

Writes FILE.json, and from it FILE.md (targets, tables) and FILE.png (a chart like the paper's Figure 4).
`measure=false` makes the page and the chart again from a FILE.json.
"""

import json
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from engine.reporting import errors_for_users

from .arguments import Benchmark, with_defaults
from .benchmark import measure
from .page import write_page


def run(values: DictConfig) -> Path:
    """Measure, write everything; returns the path of the page. Raises ValueError for impossible arguments."""
    if OmegaConf.is_missing(values, "out"):
        raise ValueError("out has no value: give out=FILE.json, the file to write")
    config = OmegaConf.to_object(values)
    out = Path(config.out)
    if out.suffix != ".json":
        raise ValueError(f"out={config.out}: expected a file that ends in .json")
    if config.measure:
        result = measure(with_defaults(config))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_as_text(result))
    elif not out.is_file():
        raise ValueError(f"measure=false makes the page of a file that was measured before, and {out} does not exist")
    return write_page(out)


def _as_text(result: dict) -> str:
    """JSON with one row in a line."""
    head = {key: value for key, value in result.items() if key not in ("rows", "left_out")}
    lists = [
        f'"{key}": [\n' + ",\n".join(json.dumps(entry) for entry in result[key]) + "\n]" for key in ("rows", "left_out")
    ]
    return json.dumps(head, indent=1).removesuffix("\n}") + ",\n" + ",\n".join(lists) + "\n}\n"


ConfigStore.instance().store(name="abn_benchmark", node=Benchmark)


@hydra.main(version_base="1.3", config_path="../../configs", config_name="bench_abn")
def main(values: DictConfig) -> None:
    with errors_for_users():
        print(run(values))


if __name__ == "__main__":
    main()
