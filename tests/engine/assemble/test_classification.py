"""The loss of classification."""

import pytest
import torch

from engine.assemble.tasks import TASKS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_of_16_bit_logits_equals_float32_s_and_can_be_scaled(dtype):
    """GradScaler begins with 2^16, which no float16 gradient of a float16 loss survives."""
    torch.manual_seed(0)
    logits = torch.randn(4, 1000).to(dtype).requires_grad_()
    labels = torch.arange(4)
    loss = TASKS["classification"].loss(None)(logits, labels)
    (2**16 * loss).backward()
    expected = torch.nn.functional.cross_entropy(logits.detach().double(), labels)
    assert loss.dtype == torch.float32 and abs(loss.item() - expected) < 1e-5
    assert logits.grad.isfinite().all()
