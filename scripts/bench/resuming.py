"""Benchmarks that go on where an earlier call stopped."""

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from engine.records.provenance import provenance
from scripts.bench.frame import Arguments, known_of


def environment_with(packages: Iterable[str]) -> dict:
    """`provenance()` with the versions of more packages, if they are installed."""
    found = provenance()
    for package in packages:
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def begun(arguments: Arguments, environment: dict) -> dict:
    """The record that an earlier call with the same arguments, except for `only`, has left; {} if there is none.

    Raises:
        ValueError: the record is of other arguments, hardware or versions than `environment` has. Versions of packages
            may be added.
    """
    out = Path(arguments.out)
    if not out.is_file():
        return {}
    record = json.loads(out.read_text())
    earlier, now = record["arguments"], known_of(arguments)
    differing = [f"{name}={earlier.get(name)}" for name in now if name != "only" and earlier.get(name) != now[name]]
    if record["environment"]["hardware"] != environment["hardware"]:
        differing.append("hardware")
    versions = record["environment"]["versions"]
    differing += [f"{name} {known}" for name, known in versions.items() if environment["versions"].get(name) != known]
    if differing:
        raise ValueError(
            f"out={out} holds results of a call that differs ({', '.join(differing)}): repeat that call to continue "
            f"it, or give another file"
        )
    return record


def commits(record: dict, environment: dict) -> str | None:
    """The commits of a record and of the code that runs now."""
    before = record.get("environment", {}).get("commit") or ""
    return ", ".join(dict.fromkeys(filter(None, [*before.split(", "), environment["commit"]]))) or None
