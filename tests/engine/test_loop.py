"""One training step: accumulation, non-finite losses, the input's normalisation, the schedule of the learning rate."""

from functools import partial

import cv2
import pytest
import torch
from torch import nn

from engine import build, schema
from engine.inference import predict
from engine.loop import ImageInput, train_step
from engine.losses import BootstrappedCrossEntropy
from engine.schedule import Schedule, in_steps

CPU = torch.device("cpu")


def step(network, optimizer, images, labels, accumulation_steps=1, precision="float32"):
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return train_step(
        network,
        BootstrappedCrossEntropy(),
        optimizer,
        scheduler,
        images,
        labels,
        image_input=ImageInput([0.5] * 3, [0.25] * 3, CPU, channels_last=False),
        autocast=build.autocast(precision, CPU),
        accumulation_steps=accumulation_steps,
    )


def minibatch():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    return images, torch.randint(0, 5, (4, 8, 8), dtype=torch.uint8)


def test_accumulation_gives_the_step_of_the_whole_minibatch():
    """For a network without batch statistics; those are of the parts by nature."""
    weights = []
    for parts in (1, 2, 4):
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 3, padding=1)
        loss = step(network, torch.optim.SGD(network.parameters(), lr=0.1), *minibatch(), accumulation_steps=parts)
        weights.append((loss, network.weight.detach()))
    for loss, weight in weights[1:]:
        assert loss == pytest.approx(weights[0][0], rel=1e-6)
        torch.testing.assert_close(weight, weights[0][1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_leaves_the_weights(value):
    network = nn.Conv2d(3, 5, 1)
    nn.init.constant_(network.bias, value)
    before = network.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="nan"):
        step(network, torch.optim.SGD(network.parameters(), lr=0.1), *minibatch())
    assert torch.equal(network.weight, before)


def test_bfloat16_reaches_the_network():
    class Recorder(nn.Conv2d):
        def forward(self, x):
            self.output = super().forward(x)
            return self.output

    network = Recorder(3, 5, 1)
    step(network, torch.optim.SGD(network.parameters(), lr=0.1), *minibatch(), precision="bfloat16")
    assert network.output.dtype == torch.bfloat16 and network.weight.dtype == torch.float32


def test_images_are_normalised_in_the_memory_format_of_the_network():
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    inputs = ImageInput(mean, std, CPU, channels_last=True)(images)
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(inputs, expected, rtol=0, atol=1e-5)
    assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_whole_images_are_seen_at_the_base_size_and_predicted_at_their_own():
    """Resized as in the training, that is as OpenCV resizes; predictions by their nearest pixel."""

    class Brightest(nn.Module):
        def forward(self, x):
            self.seen = x
            return x

    images = torch.randint(0, 256, (1, 3, 36, 60), dtype=torch.uint8)
    network = Brightest()
    options = dict(autocast=build.autocast("float32", CPU))
    at_base = ImageInput([0.0] * 3, [1.0] * 3, CPU, channels_last=True, base_size=20)
    predictions = predict(network, images, image_input=at_base, **options)
    resized = torch.from_numpy(cv2.resize(images[0].permute(1, 2, 0).numpy(), (20, 12))).permute(2, 0, 1)
    assert (network.seen[0] * 255 - resized).abs().max() <= 1
    assert predictions.shape == (1, 36, 60) and predictions.dtype == torch.uint8
    assert torch.equal(predictions, network.seen.argmax(dim=1).repeat_interleave(3, 1).repeat_interleave(3, 2).byte())

    own = predict(network, images, image_input=ImageInput([0.0] * 3, [1.0] * 3, CPU, channels_last=True), **options)
    assert torch.equal(own, images.float().argmax(dim=1).to(torch.uint8))


def test_learning_rate_follows_the_paper():
    """lr_0 (1 - iter / max_iter)^0.9, section 4.2."""
    config = schema.Optim(lr=2.5e-3)
    optimizer = build.optimizer(config, [nn.Parameter(torch.zeros(1))])
    scheduler = build.lr_schedule(config, optimizer, total_steps=200)
    for iteration in range(200):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-3 * (1 - iteration / 200) ** 0.9, rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0
    assert optimizer.param_groups[0] | {"momentum": 0.9, "weight_decay": 1e-4} == optimizer.param_groups[0]


def test_durations_in_steps():
    in_run = partial(in_steps, steps_per_epoch=185)
    assert in_run(360, None) == 66_600  # Cityscapes: 2975 images, 16 crops
    assert in_run(360, 500) == in_run(1000, 500) == 500
    assert in_run(2, 500) == 370  # the shorter of both
    assert in_run(None, None) is None


def test_schedule_counts_steps_done():
    schedule = Schedule(total_steps=10, steps_per_epoch=4, evaluate_every=5, checkpoint_every=4, log_every=3)
    done = range(1, 11)
    assert [s for s in done if schedule.evaluates(s)] == [5]  # the end is evaluated by the run itself
    assert [s for s in done if schedule.checkpoints(s)] == [4, 8, 10]
    assert [s for s in done if schedule.logs(s)] == [3, 6, 9, 10]
    assert schedule.epoch(10) == 2.5
