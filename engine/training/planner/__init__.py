"""The memory of a training step, and the minibatch that fits into a device, without a device."""

from engine.training.planner.fit import (
    classes_of,
    crop_text,
    fake_step,
    fitted,
    fitting,
    needed,
    room,
    share_of,
    step_memory,
    training_images,
    within_budget,
)
from engine.training.planner.trace import FakeTensors
