"""`upsampled_cross_entropy` on a CUDA device, against float64 on the CPU."""

import pytest
import torch

from keepless import upsampled_cross_entropy
from tests.cuda import NEEDS_CUDA
from tests.loss_cases import plain, sample, value_and_gradient

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("chosen", [{"fraction": 0.25}, {"reduction": "mean", "align_corners": True}, {}])
def test_the_loss_equals_float64(chosen, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    logits, labels = sample(2, 3, (4, 5), (9, 19), dtype=torch.float32)
    expected = value_and_gradient(plain, logits.double(), labels, **chosen)
    found = value_and_gradient(upsampled_cross_entropy, logits.cuda(), labels.cuda(), **chosen)
    torch.testing.assert_close([one.cpu().double() for one in found], list(expected), rtol=1e-5, atol=1e-6)
