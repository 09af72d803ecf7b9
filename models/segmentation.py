"""A segmentation network: body, head and a classifier per feature cell."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bodies.body import Feature
from models.initialisation import initialise
from models.private_torch import assert_on_device

EXACT, STRETCHED = UPSAMPLINGS = ("exact", "stretched")


class Output(NamedTuple):
    """Logits, which a loss compares with the labels."""

    logits: Tensor  # (N, classes, ceil(H / stride), ceil(W / stride))
    stride: int  # pixels that a cell covers along each side
    weight: float = 1.0  # of their loss in the sum


class Outputs(NamedTuple):
    """What a network returns in training."""

    main: Output
    auxiliary: tuple[Output, ...] = ()


class SegmentationNetwork(nn.Module):
    """images -> body -> head -> `cls`, a 1x1 convolution with bias -> logits (section 4.2 of the paper).

    A cell of features covers exactly `body.output_stride` pixels along each side, and a cell of logits `stride`. Images
    whose sides are no multiples of the larger are padded on the right and below, and the logits are cut to the image.
    In training the logits stay at the network's resolution: losses interpolate them, a tile at a time.

    Args:
        body: (N, C, H, W) -> features, e.g. from `models.bodies` with classes=0. `output_stride`: H over their height.
        head: the body's features -> features with `head.out_channels` channels. If it has `reads`, strides or places
            from the end (see `features_read`), it gets a list of these features, and its result has the cells of the
            first. `head.output_stride`, if it has one: pixels that a cell of its result covers instead. A method
            `head.decide`, if it has one, chooses the classes of pixels, see `decide`. A module
            `head.auxiliary`, with `reads` and the `loss_weight` of its loss, makes logits of its own in training; of a
            ModuleList each does.
        classes: number of classes, not counting the ignored label.

    ValueError: the body ends in a classifier, or lacks a feature; or classes is below 1.
    """

    body: Any  # a module
    head: Any

    def __init__(self, body: nn.Module, head: nn.Module, classes: int):
        super().__init__()
        if getattr(body, "classes", 0):
            raise ValueError(f"the body classifies whole images into {body.classes} classes: build it with classes=0")
        if classes < 1:
            raise ValueError(f"classes={classes}: expected the number of classes to segment, at least 1")
        self.body = body
        self.head = head
        channels = getattr(head, "out_channels", None)
        if not isinstance(channels, int):
            raise ValueError(
                f"{type(head).__name__} has out_channels={channels!r}: expected the number of its result's channels, "
                f"which its constructor sets"
            )
        self.cls = nn.Conv2d(channels, classes, 1)
        self.classes = classes
        if self.grid % self.stride or self.grid % self.body.output_stride:
            raise ValueError(
                f"{type(head).__name__} has cells of {self.stride} pixels after a body of {self.body.output_stride}: "
                f"expected one to divide the other"
            )
        for auxiliary in self.auxiliaries:
            if not hasattr(auxiliary, "loss_weight"):
                raise ValueError(
                    f"{type(head).__name__}.auxiliary ({type(auxiliary).__name__}) has no loss_weight: give it one, "
                    f"such as 0.4, and reads, such as (-1,); its forward gets a list of these features"
                )
        initialise(self.cls)

    @property
    def stride(self) -> int:
        """Pixels that a cell of the logits covers along each side."""
        return getattr(self.head, "output_stride", None) or self._read_by(self.head)[0].stride

    @property
    def grid(self) -> int:
        """Pixels that a cell of the logits or of the body covers, whichever is larger: sides become multiples."""
        return max(self.stride, self.body.output_stride)

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels that a cell covers along each side, for each of `Outputs`."""
        return (self.stride, *(self._read_by(auxiliary)[0].stride for auxiliary in self.auxiliaries))

    @property
    def auxiliaries(self) -> list[Any]:
        """The modules that make further logits in training."""
        auxiliary = getattr(self.head, "auxiliary", None)
        if isinstance(auxiliary, nn.ModuleList):
            return [*auxiliary]
        return [auxiliary] if isinstance(auxiliary, nn.Module) else []

    @property
    def unread_feature(self) -> str:
        """The name of the body's last feature, if it is trained and no head reads it: its layers get no gradients.

        Otherwise empty.
        """
        if not any(parameter.requires_grad for parameter in self.body.parameters()):
            return ""
        (last_feature,) = features_read(self.body, (-1,), "")
        is_read = any(last_feature in self._read_by(head) for head in (self.head, *self.auxiliaries))
        return "" if is_read else last_feature.name

    def decide(self, scores: Tensor) -> Tensor:
        """The classes of pixels, (N, H, W), by their logits (N, classes, H, W): the largest, or as the head says.

        Of several views of an image, the logits are the logarithms of the mean probabilities. ValueError: the head's
        result is no class of each pixel. (On CUDA, an id that is none fails an assertion.)
        """
        if not hasattr(self.head, "decide"):
            return scores.argmax(dim=1)
        ids = self.head.decide(scores)
        if not torch.compiler.is_compiling():  # a program for all sizes
            self._check_decision(ids, (len(scores), *scores.shape[2:]))
        return ids

    def _check_decision(self, ids: object, shape: tuple[int, ...]) -> None:
        """ValueError, or on CUDA a failed assertion, unless the head's `decide` returned ids of classes in a shape."""
        returned = f"the head's {type(self.head).__name__}.decide returned"
        if not isinstance(ids, Tensor) or ids.shape != shape or ids.is_floating_point() or ids.is_complex():
            actual = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{returned} {actual}: expected whole numbers {shape}, the class of each pixel")
        is_valid = ((ids >= 0) & (ids < self.classes)).all()
        message = f"{returned} ids other than 0 to {self.classes - 1}"
        if ids.is_cuda:
            assert_on_device(is_valid, message)
        elif not is_valid:
            raise ValueError(message)

    def _read_by(self, module: nn.Module) -> list[Feature]:
        """The features of the body that a head reads: the last one if it does not say."""
        reader = type(self.head).__name__
        if module is not self.head:
            reader = f"{reader}.auxiliary ({type(module).__name__})"
        return features_read(self.body, getattr(module, "reads", (-1,)), reader)

    def forward(self, images: Tensor, upsampling: str = EXACT, cells: bool = False) -> Tensor | Outputs:
        """Normalised images (N, C, H, W) -> logits, before any softmax.

        In training `Outputs`, with one logit per cell. In eval mode (N, classes, H, W), at least in float32,
        interpolated bilinearly between the centres of the cells. ValueError: a head's result has other cells.

        Args:
            upsampling: "stretched", for comparisons with the released inference: nothing is padded, and the cells are
                stretched to the image.
            cells: in eval mode too, the logits of the cells, at least in float32.
        """
        size = images.shape[2:]
        is_exact = upsampling != STRETCHED
        modules = [self.head, *(self.auxiliaries if self.training else ())]
        outputs = self._outputs(_padded(images, self.grid) if is_exact else images, modules)
        if is_exact:
            outputs = [self._cut(output, size, module) for output, module in zip(outputs, modules, strict=True)]
        main, *auxiliary = outputs
        if self.training:
            return Outputs(main, tuple(auxiliary))
        logits = main.logits
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # in 16 bits, interpolated logits of two classes are often equal
        return logits if cells else upsampled(logits, size, main.stride if is_exact else None)

    def _outputs(self, images: Tensor, modules: Sequence[Any]) -> list[Output]:
        """The outputs of the head and its auxiliaries, `modules`, before they are cut."""
        features_by_module = [self._read_by(module) for module in modules]
        names = list(dict.fromkeys(feature.name for features in features_by_module for feature in features))
        (last_feature,) = features_read(self.body, (-1,), "")
        if names == [last_feature.name]:
            last_map = self.body(images)
            _check_returned(self.body, last_map, getattr(self.body, "out_channels", None))
            maps_by_name = {last_feature.name: last_map}
        else:
            maps_by_name = dict(zip(names, self.body(images, names), strict=True))
        outputs = []
        for module, features in zip(modules, features_by_module, strict=True):
            maps = [maps_by_name[feature.name] for feature in features]
            if module is self.head:
                result = module(maps if hasattr(module, "reads") else maps[0])
                outputs.append(Output(self._classified(result), self.stride))
            else:
                outputs.append(Output(module(maps), features[0].stride, module.loss_weight))
        return outputs

    def _classified(self, features: Tensor) -> Tensor:
        """The logits of the head's result. ValueError: it is no (N, out_channels of the head, h, w)."""
        _check_returned(self.head, features, self.cls.in_channels)
        return self.cls(features)

    def _cut(self, output: Output, size: Sequence[int], module: nn.Module) -> Output:
        """A module's logits of padded images, cut to the cells of images of `size`. ValueError: they have others."""
        logits, stride, _ = output
        if stride == self.grid:  # nothing to cut
            return output
        padded_cells = tuple(rounded_up(side, self.grid) // stride for side in size)
        if not torch.compiler.is_compiling() and tuple(logits.shape[2:]) != padded_cells:
            raise ValueError(
                f"{type(module).__name__} has {logits.shape[2]}x{logits.shape[3]} cells for images of "
                f"{size[0]}x{size[1]} pixels: expected {padded_cells[0]}x{padded_cells[1]}, as those of the first "
                f"feature that it reads"
            )
        height, width = (rounded_up(side, stride) // stride for side in size)
        if padded_cells == (height, width) and not torch.compiler.is_exporting():  # a program is for all sizes
            return output
        return output._replace(logits=logits[..., :height, :width])


def _check_returned(module: nn.Module, features: Any, channels: int | None) -> None:
    """ValueError: what a body or head returned is no (N, out_channels, h, w). `channels`: None if it says none."""
    if not isinstance(features, Tensor) or features.dim() != 4 or channels not in (None, features.shape[1]):
        returned = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        expected = f"expected (N, {channels or 'channels'}, h, w), as its out_channels say"
        raise ValueError(f"{type(module).__name__} returned {returned}: {expected}")


def features_read(body: Any, reads: Sequence[int], reader: str) -> list[Feature]:
    """The features of a body that `reads` names.

    Each entry is a stride, of which the last such feature is taken, or below 0 a place from the end: -1 is the last.
    ValueError, naming the `reader`: the body lacks one. A body without `feature_info` has its result alone.
    """
    if not isinstance(reads, Sequence) or not all(type(read) is int and read for read in reads) or not reads:
        raise ValueError(
            f"{reader} has reads={reads!r}: expected a tuple of strides above 0, or of places from the end below 0, "
            f"such as (4, -1)"
        )
    channels = getattr(body, "out_channels", 0)  # which only heads that are yet to be built need
    features = getattr(body, "feature_info", None) or (Feature("last", channels, body.output_stride),)
    read_features = []
    for read in reads:
        if read > 0:
            candidates = [feature for feature in features if feature.stride == read]
        else:
            candidates = [features[read]] if -len(features) <= read < 0 else []
        if not candidates:
            names = ", ".join(f"{feature.name} (stride {feature.stride})" for feature in features)
            description = f"features of stride {read}" if read > 0 else f"the feature at place {read} from the end"
            raise ValueError(f"{reader} reads {description}, which {type(body).__name__} lacks: it has {names}")
        read_features.append(candidates[-1])
    return read_features


def upsampled(logits: Tensor, size: Sequence[int], stride: int | None) -> Tensor:
    """Logits of cells (N, K, h, w) -> of pixels (N, K, *size), bilinearly; a cell covers `stride` pixels along a side.

    stride=None: the cells are stretched to `size`.
    """
    if stride is None:
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)
    covered_size = [cells * stride for cells in logits.shape[2:]]
    return F.interpolate(logits, covered_size, mode="bilinear", align_corners=False)[..., : size[0], : size[1]]


def rounded_up(side: int, stride: int) -> int:
    """The next multiple of a stride, for symbolic sizes too.

    A product, because PyTorch then knows that it divides by 2, 4, …; of positive numbers, because ONNX rounds negative
    quotients towards zero.
    """
    return (side + stride - 1) // stride * stride


def _padded(images: Tensor, stride: int) -> Tensor:
    """Images (N, C, H, W) up to multiples of `stride` pixels: their last rows and columns are repeated.

    Zeros score the same within the noise of a training (docs/results/camvid.md, "Images of any size"). Without padding,
    networks that pad like TensorFlow shift: their padding depends on the size.
    """
    height, width = images.shape[2:]
    below, right = -height % stride, -width % stride
    if torch.compiler.is_exporting():  # a program for all sizes cannot ask whether there is a remainder
        padded = F.pad(images, (0, stride - 1, 0, stride - 1), mode="replicate")
        return padded[..., : rounded_up(height, stride), : rounded_up(width, stride)]
    if not below and not right:
        return images
    is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
    padded = F.pad(images, (0, right, 0, below), mode="replicate")  # on CUDA never in channels_last
    return padded.contiguous(memory_format=torch.channels_last if is_channels_last else torch.contiguous_format)
