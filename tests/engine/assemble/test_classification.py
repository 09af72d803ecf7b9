"""The splits and the loss of classification."""

import pytest
import torch

from engine.assemble.classification import evaluated_split
from engine.assemble.tasks import TASKS
from tests.runs import classification_config


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


def test_a_checkpoint_that_lacks_the_mean_image_is_no_key_error():
    """Images without it would be others than the network was trained on."""
    config = classification_config("data.mean_image=true", "data.mean=[0,0,0]")
    with pytest.raises(ValueError, match="^the checkpoint has no 'mean_image', which data.mean_image=true needs"):
        evaluated_split(config.data, "val", {"classes": ["a"]})
