"""Model FLOPs utilisation (MFU): the arithmetic of a training step per second, as a share of the device's peak."""

import re

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.process.forward import Forward

# Dense operations per second in 10^12, from the vendor's data sheets: float16 or bfloat16, TF32, float32.
_PEAKS = {
    "V100": (125.0, 15.7, 15.7),
    "A100": (312.0, 156.0, 19.5),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 80GB HBM3": (989.0, 494.0, 67.0),
    "H200": (989.0, 494.0, 67.0),
}


def peak_flops(device_name: str, precision: str, tf32: bool) -> float | None:
    """Operations per second of a device at its best; None if it is unknown.

    `device_name` is as from `torch.cuda.get_device_name`, `precision` "float32", "bfloat16" or "float16".
    """
    column = 0 if precision != "float32" else 1 if tf32 else 2
    return next(
        (1e12 * peaks[column] for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None
    )


def training_flops(forward: Forward, crop: tuple[int, int]) -> int:
    """Floating-point operations for one crop in a training step: three times the forward pass's convolutions.

    `crop`: (height, width) in pixels. Norms and activations do not count. Leaves the network in the mode
    it was in.
    """
    images = torch.zeros(1, 3, *crop, dtype=torch.uint8)
    was_training = forward.network.training
    forward.network.eval()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        forward(images)
    forward.network.train(was_training)
    return 3 * counter.get_total_flops()
