"""One training step: accumulation, non-finite losses, the input's normalisation, the schedule of the learning rate."""

from functools import partial

import cv2
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine import build, schema
from engine.distributed import World
from engine.image_input import ImageInput
from engine.inference import predict
from engine.learner import Learner, renew_statistics
from engine.loop import train_step
from engine.losses import BootstrappedCrossEntropy
from engine.schedule import Schedule, in_steps
from models.layers import InPlaceABN

CPU = torch.device("cpu")


def learner_of(network: nn.Module, lr: float = 0.1, precision: str = "float32", **options) -> Learner:
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    return Learner(network, network, optimizer, scheduler, scaler, **options)


def step(learner, images, labels, accumulation_steps=1, precision="float32") -> tuple[float, float]:
    return train_step(
        learner,
        BootstrappedCrossEntropy(),
        images,
        labels,
        world=World(),
        crops_per_minibatch=len(images),
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
    for parts in (1, 2, 3, 4):  # three are of 2, 1 and 1 crops
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 3, padding=1)
        loss, _ = step(learner_of(network), *minibatch(), accumulation_steps=parts)
        weights.append((loss, network.weight.detach()))
    for loss, weight in weights[1:]:
        assert loss == pytest.approx(weights[0][0], rel=1e-6)
        torch.testing.assert_close(weight, weights[0][1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_leaves_the_weights(value):
    network = nn.Conv2d(3, 5, 1)
    nn.init.constant_(network.bias, value)
    before = network.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="the loss is nan; the weights with the largest norm are bias"):
        step(learner_of(network), *minibatch())
    assert torch.equal(network.weight, before)


def test_bfloat16_reaches_the_network():
    class Recorder(nn.Conv2d):
        def forward(self, x):
            self.output = super().forward(x)
            return self.output

    network = Recorder(3, 5, 1)
    step(learner_of(network), *minibatch(), precision="bfloat16")
    assert network.output.dtype == torch.bfloat16 and network.weight.dtype == torch.float32


class BrokenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * float("inf")


def with_broken_gradient() -> nn.Sequential:
    class Break(nn.Module):
        def forward(self, x):
            return BrokenGradient.apply(x)

    return nn.Sequential(nn.Conv2d(3, 4, 1), Break(), nn.Conv2d(4, 5, 1))


def test_a_non_finite_gradient_is_named_and_leaves_the_weights():
    network = with_broken_gradient()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    expected = r"the gradient is (nan|inf); 2 of 4 are not finite, 0.weight first; the largest norm has that of 0\.\w+"
    with pytest.raises(FloatingPointError, match=expected):
        step(learner_of(network), *minibatch())
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())


def test_float16_leaves_steps_out_and_scales_down_until_it_gives_up():
    network = with_broken_gradient()
    before = network[0].weight.detach().clone()
    learner = learner_of(network, precision="float16")
    for _ in range(29):  # 2^16 is halved at every step
        step(learner, *minibatch(), precision="float16")
    assert torch.equal(network[0].weight, before) and learner.scaler.get_scale() == 2.0**-13
    step(learner, *minibatch(), precision="float16")
    with pytest.raises(FloatingPointError, match="the gradient is"):
        step(learner, *minibatch(), precision="float16")


def test_a_gradient_whose_norm_alone_overflows_is_named():
    learner = learner_of(nn.Linear(2, 1))
    for parameter in learner.network.parameters():
        parameter.grad = torch.full_like(parameter, 1e25)
    expected = r"the gradient is inf; all are finite; the largest norm has that of weight \(1.41e\+25\)"
    with pytest.raises(FloatingPointError, match=expected):
        learner.check(1.0, learner.gradient_norm().item())


def test_clipping_scales_longer_gradients_down_to_the_norm():
    gradients = []
    for longest in (None, 1e9, 0.01):
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 1)
        _, norm = step(learner_of(network, max_gradient_norm=longest), *minibatch())
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    whole, kept, clipped = gradients
    assert norm == pytest.approx(whole.norm().item()) and norm > 0.01
    assert torch.equal(kept, whole)
    torch.testing.assert_close(clipped, whole * (0.01 / norm))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_steps_as_float32_does(precision):
    steps = []
    for each in ("float32", precision):
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 3, padding=1)
        before = network.weight.detach().clone()
        step(learner_of(network, precision=each), *minibatch(), precision=each)
        steps.append(network.weight.detach() - before)
    assert 0 < (steps[1] - steps[0]).norm() < 1e-2 * steps[0].norm()


def test_averaged_weights_follow_the_recursion():
    """average <- decay average + (1 - decay) weights after every step but the first, which it begins with."""
    network = nn.Conv2d(3, 5, 1)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    learner, expected = learner_of(network, average=average), None
    for _ in range(4):
        step(learner, *minibatch())
        now = network.weight.detach().clone()
        expected = now if expected is None else 0.75 * expected + 0.25 * now
    torch.testing.assert_close(learner.evaluated.weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
def test_renewed_statistics_are_the_average_of_the_given_minibatches(norm):
    """What PyTorch's update_bn gives, without the dropout that it leaves on."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.9), norm(4)).train()
    minibatches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    renew_statistics(network, minibatches, autocast=build.autocast("float32", CPU), world=World())
    with torch.no_grad():
        outputs = [network[0](images).transpose(0, 1).flatten(1) for images in minibatches]
    torch.testing.assert_close(network[2].running_mean, sum(y.mean(dim=1) for y in outputs) / 3)
    torch.testing.assert_close(network[2].running_var, sum(y.var(dim=1) for y in outputs) / 3)
    assert network[2].momentum == 0.1 and not network.training


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
    assert [s for s in done if schedule.checkpoints(s)] == [4, 5, 8, 10]  # and before an evaluation
    assert [s for s in done if schedule.logs(s)] == [3, 6, 9, 10]
    assert schedule.epoch(10) == 2.5
