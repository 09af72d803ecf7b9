"""Plans of small networks, as recorded in plans.json: no change of the search makes one worse without a word.

Costs are counted, not measured: 20 us for a call, 10 GB/s, 80 Gflop/s. After a change that is meant, record them anew:
python -m tests.keepless.recompute.test_recorded_plans
"""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import CheckpointedABN
from keepless.recompute.step.dry import rehearsed_step
from keepless.recompute.step.search import Choice, frontier
from keepless.recompute.step.simulation import plain_peak
from keepless.recompute.step.step import Step
from tests.keepless.recompute.networks import IMAGES, Beside, Mixed, Row, residuals
from tests.keepless.recompute.test_search import Joined, Texts

RECORDED, SHARES = Path(__file__).with_name("plans.json"), (0.75, 0.55, 0.4)  # budgets, of the baseline's peak


class Words(Texts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


def bottleneck(width: int, inner: int) -> nn.Module:
    convolutions = [nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in ((width, inner, 1), (inner, inner, 3))]
    layers = [(conv, nn.BatchNorm2d(inner), nn.ReLU(inplace=True)) for conv in convolutions]
    last = nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)
    return Beside(lambda x, y: F.relu(x + y), *itertools.chain(*layers, last))


def dense(width: int, growth: int) -> nn.Module:
    layers = nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1)
    return Beside(lambda x, y: torch.cat([x, y], 1), *layers)


def pools() -> nn.Module:
    """Their indices are temporary, and take twice the bytes of their results."""
    parts = [Beside(lambda x, y: x + y, nn.SiLU(), nn.MaxPool2d(3, 1, 1)) for _ in range(5)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *parts)


NETWORKS: dict[str, Row] = {
    "ResNet": (lambda: nn.Sequential(*(bottleneck(16, 8) for _ in range(6))), (2, 16, 16, 16)),
    "DenseNet": (lambda: nn.Sequential(*(dense(8 * (one + 1), 8) for one in range(8))), (2, 8, 16, 16)),
    "U-Net, in place": (Joined, (2, 3, 32, 32)),
    # Dropout and attention: one recipe computes several values.
    "transformer": (lambda: Words(1, 1), (2, 64)),
    "grouped values, dropout": (partial(residuals, CheckpointedABN, 4, store="x_hat"), IMAGES),
    "mixed": (Mixed, (4, 3, 16, 16)),
    "pools": (pools, (2, 3, 16, 16)),
}


def counted_costs(name: str) -> Step:
    """A network's step, with costs that are counted."""
    make, shape = NETWORKS[name]
    step = rehearsed_step(make().to("meta"), (torch.empty(shape, device="meta"),), {})
    counted = [one._replace(seconds=2e-5 + one.bytes / 1e10 + one.operations / 8e10) for one in step.values]
    return step._replace(values=counted, seconds=3 * sum(one.seconds for one in counted))


def plans_of(name: str) -> list[float]:
    """The baseline's peak; the peak and microseconds of the plan for each budget; the same from the whole front."""
    step = counted_costs(name)
    plain, whole = plain_peak(step), frontier(step)
    limits = [int(share * plain) for share in SHARES]
    chosen = [fastest(frontier(step, limit), limit) for limit in limits] + [fastest(whole, one) for one in limits]
    return [plain, *(number for one in chosen for number in (one.peak, round(1e6 * one.seconds, 1)))]


def fastest(choices: list[Choice], limit: int) -> Choice:
    """The fastest choice within the limit; if there is none, the one of the lowest peak."""
    return next((one for one in choices if one.peak <= limit), choices[-1])


@pytest.mark.table
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_are_the_recorded_ones(name):
    """Within 2 %."""
    assert plans_of(name) == pytest.approx(json.loads(RECORDED.read_text())[name], rel=0.02)


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(plans_of(name))}" for name in NETWORKS]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
