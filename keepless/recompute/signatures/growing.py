"""Inputs of a larger size than have come, to plan for where sizes grow from step to step."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...inputs import tensors_in
from ...saved import is_ordinary
from ...torch_internals import tree_map


def enlarged(arguments: Any, before: Sequence[int], most: float) -> Any:
    """Arguments whose dimensions that are larger than before are larger still: up to `most` times the bytes.

    Entries are repeated. Sizes stay multiples of what all were multiples of, as of a patch's.
    """
    sizes, larger, inputs = iter(before), {}, [one for one in tensors_in(arguments) if is_ordinary(one)]
    known = [list(zip(one.shape, sizes, strict=False)) for one in inputs]
    factor = most ** (1 / max(sum(size > old for size, old in each) for each in known))
    with torch.no_grad():
        for one, each in zip(inputs, known, strict=True):
            new = one.detach()
            for dim, (size, old) in enumerate(each):
                if size > old:
                    unit = math.gcd(size, old)
                    more = int(size * factor) // unit * unit - size
                    new = torch.cat([new, new.narrow(dim, 0, more)], dim)
            larger[id(one)] = new.requires_grad_(one.requires_grad)
    return tree_map(lambda leaf: larger.get(id(leaf), leaf), arguments)
