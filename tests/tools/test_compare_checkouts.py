"""Comparing two checkouts: every differing bit counts, and only results do. No training runs."""

import json

import torch
from PIL import Image

from tests.runs import checked
from tools.compare_checkouts import COMMANDS, IGNORED, leaves, read


def test_values_are_equal_to_the_bit_or_differ(tmp_path):
    """-0.0 is not 0.0, and 1 is not 1.0; how pixels are compressed is no result."""

    def texts(loss: str, zero: float, step: float, level: int, compress_level: int) -> list[str]:
        (tmp_path / "metrics.jsonl").write_text(f'{{"loss": {loss}}}\n{json.dumps({"mfu": compress_level})}\n')
        torch.save({"w": zero * torch.ones(2, dtype=torch.bfloat16), "step": step}, tmp_path / "last.pt")
        Image.new("L", (2, 2), level).save(tmp_path / "picture.png", compress_level=compress_level)
        values = {name: text for file in tmp_path.iterdir() for name, text in leaves(read(file), file.name)}
        return [text for name, text in sorted(values.items()) if not IGNORED.search(name)]

    texts_of_values = texts("0.5", 0.0, 1, 7, 9)
    assert texts_of_values == texts("0.50000000000000001", 0.0, 1, 7, 0)
    changed_texts = texts("0.50000000000000011", -0.0, 1.0, 8, 9)
    assert len(texts_of_values) == 4 and not {*texts_of_values} & {*changed_texts}


def test_the_commands_name_keys_that_exist():
    for line in COMMANDS:
        words = line.rpartition(" 2 ")[2].removeprefix("-m scripts.").split()
        checked(words[0].removesuffix(".py"), *words[1:])
