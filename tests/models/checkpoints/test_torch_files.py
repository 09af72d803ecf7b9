"""Files that no code can walk through are refused as they are read."""

import pytest
import torch

from engine.checkpoint import files as checkpoint


def doubled(times: int) -> list:
    """A list that unfolds to 2^times leaves."""
    value: list = [0]
    for _ in range(times):
        value = [value, value]
    return value


def within_itself() -> dict:
    config: dict = {}
    config["config"] = config
    return config


@pytest.mark.injects("crafted checkpoint", "its configuration contains itself or unfolds to 2^40 leaves", into="files")
@pytest.mark.parametrize("config", [within_itself(), {"a": doubled(40)}, {"a": [[0] * 2000] * 2000}], ids=range(3))
def test_a_configuration_without_end_is_refused(tmp_path, config):
    torch.save({"format": checkpoint.FORMAT, "config": config}, tmp_path / "last.pt")
    reason = "its containers are nested more than 64 deep, or hold 2,000,000 parts or more"
    with pytest.raises(
        ValueError, match=f"checkpoint {tmp_path / 'last.pt'} is damaged, or no file of torch.save .{reason}"
    ):
        checkpoint.load(tmp_path / "last.pt")


def test_a_name_of_a_megabyte_is_refused(tmp_path):
    classes = ["road", "a" * 2**20]
    state = {"format": checkpoint.FORMAT, "task": "segmentation", "step": 1, "config": {}, "classes": classes}
    torch.save(state, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="expected 1 to 65535 names of at most 1000 characters") as refused:
        checkpoint.load(tmp_path / "last.pt")
    assert len(str(refused.value)) < 500
