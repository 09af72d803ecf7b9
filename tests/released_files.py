"""Files in the layout of the in-place ABN release, and what its networks compute, written from their description.

Nothing here uses the project's layers: `Released` makes tensors under the released names, and its methods compute with
them in the dtype of their input.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


class Released:
    """Tensors of a network by name, made on first use; `plain`: norms scale by w, not by |w| + eps.

    On the meta device only names and shapes are made.
    """

    def __init__(self, plain: bool = False, seed: int = 0, device: str = "cpu"):
        self.tensors: dict[str, Tensor] = {}
        self.plain, self.device = plain, device
        self.generator = torch.Generator().manual_seed(seed)

    def _tensor(self, name: str, shape: Sequence[int], low: float, high: float) -> Tensor:
        if name not in self.tensors:
            values = torch.empty(*shape, dtype=torch.float64, device=self.device)
            self.tensors[name] = values.uniform_(low, high, generator=self.generator)
        assert self.tensors[name].shape == tuple(shape), name
        return self.tensors[name]

    def conv(self, name: str, x: Tensor, channels: int, kernel: int = 3, stride=1, dilation=1, groups=1) -> Tensor:
        inputs = x.shape[1] // groups
        bound = (3 / (inputs * kernel**2)) ** 0.5
        weight = self._tensor(f"{name}.weight", (channels, inputs, kernel, kernel), -bound, bound)
        return F.conv2d(x, weight, None, stride, dilation * (kernel // 2), dilation, groups)

    def norm(self, name: str, x: Tensor, activated: bool = True) -> Tensor:
        """Scales of either sign, all larger than eps."""
        channels = x.shape[1]
        weight = self._tensor(f"{name}.weight", [channels], 0.5, 1.5)
        if f"{name}.bias" not in self.tensors:
            weight[::3] *= -1
        bias = self._tensor(f"{name}.bias", [channels], -0.5, 0.5)
        mean = self._tensor(f"{name}.running_mean", [channels], -0.5, 0.5)
        var = self._tensor(f"{name}.running_var", [channels], 0.5, 2.0)
        scale = weight if self.plain else weight.abs() + EPS
        mean, std, scale, bias = (t.view(1, -1, 1, 1) for t in (mean, (var + EPS).sqrt(), scale, bias))
        y = (x - mean) / std * scale + bias
        return F.leaky_relu(y, 0.01) if activated else y

    def classified(self, x: Tensor, classes: int) -> Tensor:
        pooled = x.mean((2, 3))
        weight = self._tensor("classifier.fc.weight", (classes, pooled.shape[1]), -1, 1)
        return pooled @ weight.T + self._tensor("classifier.fc.bias", [classes], -1, 1)

    def stem(self, x: Tensor, channels: int, kind: str, last_norm: bool = False) -> Tensor:
        if kind == "7x7":
            x = self.conv("mod1.conv1", x, channels, 7, stride=2)
        else:
            x = self.norm("mod1.bn1", self.conv("mod1.conv1", x, channels, stride=2))
            x = self.norm("mod1.bn2", self.conv("mod1.conv2", x, channels))
            x = self.conv("mod1.conv3", x, channels)
        return F.max_pool2d(self.norm("mod1.bn1", x) if last_norm else x, 3, 2, 1)

    def identity_block(self, name: str, x: Tensor, channels: Sequence[int], stride=1, dilation=1, groups=1) -> Tensor:
        z = self.norm(f"{name}.bn1", x)
        if len(channels) == 2:
            y = self.conv(f"{name}.convs.conv1", z, channels[0], 3, stride, dilation)
            y = self.conv(f"{name}.convs.conv2", self.norm(f"{name}.convs.bn2", y), channels[1], 3, 1, dilation)
        else:
            y = self.norm(f"{name}.convs.bn2", self.conv(f"{name}.convs.conv1", z, channels[0], 1, stride))
            y = self.conv(f"{name}.convs.conv2", y, channels[1], 3, 1, dilation, groups)
            y = self.conv(f"{name}.convs.conv3", self.norm(f"{name}.convs.bn3", y), channels[2], 1)
        if stride == 1 and x.shape[1] == channels[-1]:
            return y + x
        return y + self.conv(f"{name}.proj_conv", z, channels[-1], 1, stride)

    def post_block(self, name: str, x: Tensor, channels: Sequence[int], stride=1) -> Tensor:
        kernels = (3, 3) if len(channels) == 2 else (1, 3, 1)
        y = x
        for number, (out, kernel) in enumerate(zip(channels, kernels, strict=True), start=1):
            conv_stride = stride if number == kernels.index(3) + 1 else 1
            y = self.conv(f"{name}.convs.conv{number}", y, out, kernel, conv_stride)
            y = self.norm(f"{name}.convs.bn{number}", y, activated=number < len(channels))
        if stride != 1 or x.shape[1] != channels[-1]:
            x = self.norm(f"{name}.proj_bn", self.conv(f"{name}.proj_conv", x, channels[-1], 1, stride), False)
        return F.leaky_relu(y + x, 0.01)

    def dense_module(self, name: str, x: Tensor, layers: int, growth: int) -> Tensor:
        for layer in range(layers):
            y = self.conv(f"{name}.convs1.{layer}.conv", self.norm(f"{name}.convs1.{layer}.bn", x), 4 * growth, 1)
            y = self.norm(f"{name}.convs3.{layer}.bn", y)
            x = torch.cat([x, self.conv(f"{name}.convs3.{layer}.conv", y, growth)], 1)
        return x

    def residual(self, block, x: Tensor, structure: Sequence[int], base: Sequence[int], **options) -> Tensor:
        for stage, blocks in enumerate(structure):
            for number in range(1, blocks + 1):
                stride = 2 if number == 1 and stage else 1
                x = block(f"mod{stage + 2}.block{number}", x, [c * 2**stage for c in base], stride, **options)
        return x

    def resnext(self, x, structure=(1, 2, 2, 1), base=(4, 4, 8), groups=2, channels=4, stem="3x3") -> Tensor:
        x = self.residual(self.identity_block, self.stem(x, channels, stem), structure, base, groups=groups)
        return self.norm("bn_out", x)

    def resnet(self, x, structure=(1, 2, 2, 1), base=(4, 4, 8), channels=4, stem="7x7") -> Tensor:
        return self.residual(self.post_block, self.stem(x, channels, stem, last_norm=True), structure, base)

    def densenet(self, x, structure=(2, 1, 3, 2), growth=4, channels=8, stem="3x3") -> Tensor:
        x = self.stem(x, channels, stem)
        for stage, layers in enumerate(structure, start=2):
            if stage > 2:
                x = self.norm(f"tra{stage - 1}.bn", x)
                x = F.avg_pool2d(self.conv(f"tra{stage - 1}.conv", x, x.shape[1] // 2, 1), 2)
            x = self.dense_module(f"mod{stage}", x, layers, growth)
        return self.norm("bn_out", x)

    def wider(self, x, structure, widths, channels=4, a2: int = 0) -> Tensor:
        """The plain network, or A2 with output stride `a2`, 8 or 32."""
        x = self.conv("mod1.conv1", x, channels)
        for stage, (blocks, width) in enumerate(zip(structure, widths, strict=True), start=2):
            if stage in ((2, 3) if a2 else (2, 3, 4, 5, 6)):
                x = F.max_pool2d(x, 3, 2, 1)
            strided = (4,) if a2 == 8 else (4, 5, 6) if a2 == 32 else ()
            dilation = {5: 2, 6: 4, 7: 4}.get(stage, 1) if a2 == 8 else 1
            for block in range(1, blocks + 1):
                stride = 2 if block == 1 and stage in strided else 1
                x = self.identity_block(f"mod{stage}.block{block}", x, width, stride, dilation)
        return self.norm("bn_out", x)

    def head(self, x: Tensor, hidden: int, out: int, window: int | None = None) -> Tensor:
        """`window`: side of the sliding mean; None: the mean of all cells."""
        maps = [self.conv("map_convs.0", x, hidden, 1)]
        maps += [self.conv(f"map_convs.{i + 1}", x, hidden, 3, 1, d) for i, d in enumerate((12, 24, 36))]
        reduced = self.conv("red_conv", self.norm("map_bn", torch.cat(maps, 1)), out, 1)
        if window is None:
            pooled = x.mean((2, 3), keepdim=True)
        else:
            height, width = (min(window, side) for side in x.shape[2:])
            pooled = x.unfold(2, height, 1).unfold(3, width, 1).mean((-1, -2))
            padding = ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)
            pooled = F.pad(pooled, padding, mode="replicate")
        pooled = self.norm("global_pooling_bn", self.conv("global_pooling_conv", pooled, hidden, 1))
        return self.norm("red_bn", reduced + self.conv("pool_red_conv", pooled, out, 1))

    def cls(self, x: Tensor, classes: int) -> Tensor:
        weight = self._tensor("weight", (classes, x.shape[1], 1, 1), -1, 1)
        return F.conv2d(x, weight, self._tensor("bias", [classes], -1, 1))


WIDER = dict(
    structure=(1, 1, 2, 1, 1, 1), widths=((4, 4), (8, 8), (12, 12), (8, 10), (6, 8, 12), (6, 8, 16)), channels=4
)
IMAGES = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def write_classifier(path: Path, tensors: dict[str, Tensor], prefix: str = "module.", zipped: bool = False) -> Path:
    """A classification file; its optimizer part is as of SGD with momentum."""
    state = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    buffers = {"momentum_buffer": torch.zeros(3)}
    optimizer = {"state": {0: buffers}, "param_groups": [{"lr": 0.1, "nesterov": False, "params": [0]}]}
    content = {"epoch": 90, "arch": "a net", "state_dict": state, "best_prec1": torch.tensor(77.0)}
    torch.save({**content, "optimizer": optimizer}, path, _use_new_zipfile_serialization=zipped)
    return path


def write_segmenter(path: Path, body: Released, head: Released, cls: Released) -> Path:
    parts = {"body": body.tensors, "head": head.tensors, "cls": cls.tensors}
    torch.save({"state_dict": parts}, path, _use_new_zipfile_serialization=False)
    return path


def small_resnext(path: Path) -> tuple[Path, Released]:
    """A narrow classifier's file, for `tests.bodies.small_resnext`."""
    released = Released()
    released.classified(released.resnext(IMAGES), 3)
    return write_classifier(path, released.tensors), released


def small_vistas(path: Path, classes: int = 65, dtype: torch.dtype = torch.float64) -> tuple[Path, Released]:
    """A narrow WideResNet A2 with a head of 4 and 6 channels. Returns the body's part too."""
    body, head, cls = (Released(seed=seed) for seed in range(3))
    cls.cls(head.head(body.wider(IMAGES, **WIDER, a2=8), 4, 6), classes)
    for part in (body, head, cls):
        part.tensors = {name: tensor.to(dtype) for name, tensor in part.tensors.items()}
    return write_segmenter(path, body, head, cls), body
