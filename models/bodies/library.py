"""Networks of torchvision and timm as bodies: under their own names, dilated, with our norms."""

import difflib
import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from keepless import ABN, InPlaceABN, to_inplace
from keepless.conversion.convert import layer_like, timm_activation
from keepless.norms import ConversionReport
from models.blocks import NormAct
from models.bodies.body import Body, Feature
from models.initialisation import initialise
from models.private_torch import with_dispatch_modes_off
from models.recomputation import chain, run_blocks

LIBRARY_ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU}
SIDE = 64  # pixels of the example that a new body runs on
_HEADS = ("avgpool", "classifier", "fc", "flatten", "head", "heads")  # of torchvision's networks
_KEPT_NORM_OPTIONS = ("num_features", "eps", "affine", "track_running_stats", "activation", "activation_param")
_CONVOLUTION_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
_EXPECTED = "expected a network of convolutions, such as resnet50 or convnext_tiny"
_RELU = partial(ABN, activation="relu")


class LibraryBody(Body):
    """The features of a classification network of another library: its modules run one after the other.

    Parameters keep their names and shapes, so the library's weights fit. With standard norms and ReLU, features are the
    library's. Another activation of the norms replaces its ReLUs and ReLU6s; other activations stay. In-place norms are
    used where `to_inplace` can, standard ones elsewhere, each keeping its eps. Images are padded with zeros to a
    multiple of the output stride if the network would round sizes down, or refuse them.

    Args (in addition to `Body`):
        make: network -> its modules by name, in the order in which they run; with `in_channels` other than three, it
            gets these as well.
        network: its name in the library, such as resnet50.
        last: name of the last part that is used, such as layer3 or blocks.4; None: all. Dense prediction may not need
            the last stages, whose features describe whole images, and which cost most when dilated.
        norm_act: makes `ABN` or `InPlaceABN` with an activation of LIBRARY_ACTIVATIONS.
        instead: what to do if no norm can be in place, for the message.
        own_momentum: norms keep the library's momentum (often 0.01 or less), not that of `norm_act`.
        output_stride: strided convolutions beyond it become dilated ones. Every second, fourth, … cell then has the
            strided network's features, unless the network averages over all cells (squeeze and excitation).

    Attributes:
        feature_info: the last parts before the network halves its sizes, or would without dilation, and its last part,
            by the library's names, such as layer1.
        remarks: how the network differs from the library's.
        left_out: names of the parts after `last`.

    ValueError: the modules do not run in this order, or layers other than convolutions stride; no part is `last`; no
        norm can be in place.
    """

    def __init__(
        self,
        norm_act: NormAct = _RELU,
        classes: int = 0,
        output_stride: int = 32,
        *,
        in_channels: int = 3,
        make: Callable[..., Mapping[str, nn.Module]],
        network: str,
        last: str | None = None,
        own_momentum: bool = False,
        instead: str = "use ABN",
    ):
        super().__init__()
        default_tensor = torch.empty(0)  # on the default device, perhaps fake
        # Constructors and examples compute with values, which fake and meta tensors lack.
        with with_dispatch_modes_off(), torch.device("cpu"):
            layers = make(network) if in_channels == 3 else make(network, in_channels=in_channels)
            self.left_out: tuple[str, ...] = ()
            if last is not None:
                layers, self.left_out = _cut_after(layers, last, f"last={last}: {network}")
            for name, layer in layers.items():
                self.add_module(name, layer)
            self.order = tuple(layers)
            self.classifier = None
            self.rounds_up = True
            example = torch.zeros(1, in_channels, SIDE, SIDE)
            channels, self.output_stride = self._dilate_parts(example, output_stride, network)
            self.rounds_up = self._takes_odd_sizes(in_channels)
            ends = (f"ends with {last}; without {', '.join(self.left_out)}",) if last is not None else ()
            self.remarks = ends + _exchange_activations(self, norm_act)
            self.remarks += _exchange_norms(self.train(), norm_act, own_momentum, network, instead)
            self.add_classifier(channels, classes)
            if self.classifier is not None:
                initialise(self.classifier)
        if type(default_tensor) is not Tensor or default_tensor.is_meta:
            self._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        else:
            self.to(default_tensor.device)

    @torch.no_grad()
    def _takes_odd_sizes(self, in_channels: int) -> bool:
        """Whether the network rounds sizes up: one pixel more leaves a remainder at every stride."""
        try:
            features = self(torch.zeros(1, in_channels, SIDE + 1, SIDE + 1))
        except Exception:  # a module may raise anything: DLA's shortcuts round down, its convolutions up
            return False
        return features.shape[2] == SIDE // self.output_stride + 1

    def maps(self, images: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """See `Body.maps`. ValueError: a later part writes over one of them."""
        if not self.rounds_up:
            height, width = images.shape[2:]
            images = F.pad(images, (0, -width % self.output_stride, 0, -height % self.output_stride))
        feature_ends = [self._ends[end - 1] for end in ends]
        bounds = pairwise([0, *(end for end, _ in feature_ends)])  # numbers of parts
        segments = [partial(self._run_parts, begin, end) for begin, end in bounds]
        features = [x for (x,) in run_blocks(segments, images, "none", range(1, len(segments) + 1))]
        return [x.movedim(-1, 1) if is_last else x for x, (_, is_last) in zip(features, feature_ends, strict=True)]

    def _run_parts(self, begin: int, end: int, x: Tensor) -> Tensor:
        """Run parts from `begin` to `end`. Layers before the first block and after the last are never checkpointed.

        With `sqrt`, L is the number of blocks between two features."""
        if self.recompute == "none":
            return chain(*self._modules_between(begin, end), x)
        parts = self.parts()
        blocks = [index for index, part in enumerate(parts) if part._modules] or [0]
        # Layers belong to the block after them: an activation may overwrite its input, which is not to be saved.
        cuts = [min(max(cut, begin), end) for cut in (blocks[0], *(index + 1 for index in blocks))]
        units = [partial(chain, *parts[start:stop]) for start, stop in pairwise(cuts) if start < stop]
        ((x,),) = run_blocks(units, chain(*parts[begin : cuts[0]], x), self.recompute)
        return chain(*parts[cuts[-1] : end], x)

    def _modules_between(self, begin: int, end: int) -> list[nn.Module]:
        """Parts from `begin` to `end`; all of a module's are the module, so that its hooks fire."""
        modules: list[nn.Module] = []
        index = 0
        for name in self.order:
            module = getattr(self, name)
            parts = [part for _, part in _parts(name, module)]
            is_whole = begin <= index and index + len(parts) <= end
            modules += [module] if is_whole else parts[max(begin - index, 0) : max(end - index, 0)]
            index += len(parts)
        return modules

    def parts(self) -> list[nn.Module]:
        """The blocks, and the single layers before and after them, in the order in which they run."""
        return [part for _, part in self.named_parts()]

    def named_parts(self) -> list[tuple[str, nn.Module]]:
        """`parts` with their names."""
        return [pair for name in self.order for pair in _parts(name, getattr(self, name))]

    @torch.no_grad()
    def _dilate_parts(self, x: Tensor, output_stride: int, network: str) -> tuple[int, int]:
        """Turn strides beyond `output_stride` into dilation. Returns the channels and the output stride.

        Sets `feature_info` (features, which no part after them overwrites), and `_ends`: the numbers of parts where
        they end, and whether they are (N, H, W, C).
        """
        dilation = 1
        pooling = ""  # the type of the first part that strides and cannot be dilated
        names = [name for name, _ in self.named_parts()]
        features: list[Feature] = []
        self._ends: list[tuple[int, bool]] = []

        def note(end: int, output: Tensor) -> None:
            name = _name_of_feature(names[end - 1], names, features)
            y = _channels_first(output)
            features.append(Feature(name, y.shape[1], SIDE // y.shape[-1]))
            self._ends.append((end, y is not output))

        try:
            for index, part in enumerate(self.eval().parts()):
                version = x._version
                y = part(x)
                if index and _cells(y) < _cells(x) and x._version == version:
                    note(index, x)
                stride = _cells(x) // _cells(y) if SIDE > output_stride * _cells(y) else 1
                if dilation * stride > 1:
                    _dilate_part(part, x, dilation, stride)
                    try:
                        y = part(x)
                        dilation *= stride
                    except RuntimeError:  # its shortcut pools, and still strides
                        pooling = pooling or type(part).__name__
                if SIDE > output_stride * _cells(y):
                    pooling = pooling or type(part).__name__
                x = y
            note(len(names), x)
            cells = _cells(x)
        except Exception as error:  # a module may raise anything
            raise ValueError(
                f"{network} does not run its {', '.join(self.order)} one after the other ({type(error).__name__}): "
                f"{_EXPECTED}"
            ) from error
        self._feature_info = tuple(features)
        self._check_strides(network, cells, pooling, output_stride)
        return features[-1].channels, SIDE // cells

    def _check_strides(self, network: str, cells: int, pooling: str, output_stride: int) -> None:
        """ValueError: an image does not end in a whole number of cells, or `pooling`, a type, cannot be dilated."""
        stride, remainder = divmod(SIDE, cells)
        if remainder:
            raise ValueError(f"{network} has {cells} cells for {SIDE} pixels: expected a network that halves exactly")
        if pooling and any(is_last for _, is_last in self._ends):
            raise ValueError(
                f"{network} merges patches and attends within windows, so it can neither be dilated nor take images of "
                f"any size: choose a convolutional network, such as convnext_tiny"
            )
        if pooling:
            ours = ", or the body densenet121 of this project" if "densenet" in network else ""
            raise ValueError(
                f"{network} cannot be dilated to output_stride={output_stride}, because its {pooling} strides without "
                f"a convolution: give output_stride={stride}{ours}"
            )


def _torchvision_layers(network: str, in_channels: int = 3) -> dict[str, nn.Module]:
    from torchvision import models

    _check_name(network, models.list_models(models), "torchvision")
    whole = models.get_model(network, weights=None)
    if in_channels != 3:
        _exchange_input(whole, in_channels)
    layers = dict(takewhile(lambda entry: entry[0] not in _HEADS, whole.named_children()))
    return layers | ({"relu": nn.ReLU()} if isinstance(whole, models.DenseNet) else {})  # a function there


def _timm_layers(network: str, in_channels: int = 3) -> dict[str, nn.Module]:
    """The layers of a network's last features, by `features_only=True`."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"body=timm needs timm ({error}): pip install timm, or give body=torchvision") from error

    name, _, tag = re.sub("^(hf[-_]hub:)?timm/", "", network).partition(".")
    _check_name(name, timm.list_models(), "timm")
    tagged_names = timm.list_pretrained(f"{name}.*")
    if network not in (name, *tagged_names):
        advice = f"; body.last={tag} ends with a part of it" if tag and f"{name}.{tag}" not in tagged_names else ""
        tags = ", ".join(tagged_names)
        raise ValueError(f"network={network}: expected {name}{advice}, or with a tag of its weights: {tags}")
    try:
        whole: Any = timm.create_model(network, features_only=True, out_indices=(-1,), in_chans=in_channels).eval()
        layers = dict(whole.named_children())
        example = torch.ones(1, in_channels, SIDE, SIDE)
        with torch.no_grad():
            *_, features = whole(example)
            if not torch.equal(chain(*layers.values(), example), features):
                raise ValueError("they give other features")
    except Exception as error:  # a module may raise anything
        raise ValueError(
            f"timm's {network} does not run its modules one after the other on images of any size "
            f"({type(error).__name__}: {error}): {_EXPECTED}"
        ) from error
    return layers


def _exchange_input(network: nn.Module, in_channels: int) -> None:
    """Exchange the first convolution, of three channels, for one of `in_channels` with the same options."""
    convs = ((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    name, conv = next(convs)
    options: dict[str, Any] = {option: getattr(conv, option) for option in _CONVOLUTION_OPTIONS}
    new_conv = nn.Conv2d(in_channels, conv.out_channels, bias=conv.bias is not None, **options)
    initialise(new_conv)
    network.set_submodule(name, new_conv)


torchvision_body = partial(LibraryBody, make=_torchvision_layers)
timm_body = partial(LibraryBody, make=_timm_layers)


def _cut_after(
    layers: Mapping[str, nn.Module], last: str, subject: str
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """The layers up to the part `last`, and the names of the parts after it. `subject` begins messages."""
    first_name, _, inner = last.partition(".")
    if first_name not in layers:
        raise ValueError(f"{subject} has no such part; expected one of {', '.join(layers)}, or a part of these")
    names = list(layers)
    end = names.index(first_name)
    kept = {name: layers[name] for name in names[:end]}
    later_names = names[end + 1 :]
    part = layers[first_name]
    if inner:
        children = dict(part.named_children()) if type(part) is nn.Sequential else {}
        kept_children, later_children = _cut_after(children, inner, subject)
        part = nn.Sequential(OrderedDict(kept_children))
        later_names = [f"{first_name}.{name}" for name in later_children] + later_names
    return kept | {first_name: part}, tuple(later_names)


def _check_name(network: str, names: Sequence[str], library: str) -> None:
    if network not in names:
        nearest = ", ".join(difflib.get_close_matches(network, names, n=5, cutoff=0))
        raise ValueError(f"network={network}: {library} has no such network; the nearest are {nearest}")


def _channels_first(square: Tensor) -> Tensor:
    """The features of a square image as (N, C, H, W); Swin's are (N, H, W, C)."""
    return square.movedim(-1, 1) if square.shape[1] == square.shape[2] != square.shape[-1] else square


def _cells(square: Tensor) -> int:
    return _channels_first(square).shape[-1]


def _parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named children of a module that runs them in order; a module of single layers stays whole."""
    children = list(module.children())
    in_order = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if not in_order or not any(child._modules for child in children):
        return [(name, module)]
    return [part for child_name, child in module.named_children() for part in _parts(f"{name}.{child_name}", child)]


def _name_of_feature(part: str, names: Sequence[str], earlier: Sequence[Feature]) -> str:
    """The name of the largest module that ends with a part and has no earlier feature."""
    while "." in part:
        parent = part.rpartition(".")[0]
        *_, last = (name for name in names if name.startswith((f"{part}.", f"{parent}.")))
        if not f"{last}.".startswith(f"{part}.") or any(feature.name.startswith(f"{parent}.") for feature in earlier):
            break
        part = parent
    return part


def _dilate_part(part: nn.Module, x: Tensor, dilation: int, stride: int) -> None:
    """Dilate a part whose input `x` has a dilation. Its stride becomes 1.

    Convolutions at the resolution of `x`, such as the strided one, get its dilation. Convolutions at a lower resolution
    get a larger one, in whichever order the part lists or runs them.
    """
    cells: dict[nn.Conv2d, int] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Conv2d):
            cells[module] = inputs[0].shape[-1]

    with register_module_forward_pre_hook(note):
        part(x)
    for conv in cells:
        if stride > 1:
            conv.stride = (1, 1)
        factor = dilation * min(stride, max(1, round(x.shape[-1] / cells[conv])))
        if any(side % 2 == 0 for side in conv.kernel_size):
            conv.padding = "same"
        elif not isinstance(conv.padding, str):
            conv.padding = tuple(factor * padding for padding in conv.padding)
        conv.dilation = tuple(factor * spacing for spacing in conv.dilation)


def _exchange_activations(body: LibraryBody, norm_act: NormAct) -> tuple[str, ...]:
    """Replace ReLUs and ReLU6s by the activation that `norm_act` gives its norms. Returns remarks."""
    template: Any = norm_act(1)
    if template.activation == "relu":
        return ()
    replaced_kinds: list[str] = []
    for parent in list(body.modules()):
        for name, child in parent.named_children():
            if type(child) in (nn.ReLU, nn.ReLU6):
                activation = LIBRARY_ACTIVATIONS[template.activation](template.activation_param, inplace=child.inplace)
                setattr(parent, name, activation)
                replaced_kinds.append(type(child).__name__)
    new_activation = f"{template.activation}({template.activation_param})"
    return tuple(
        f"{count} {kind}s became {new_activation}, so trained weights only start there"
        for kind, count in Counter(replaced_kinds).items()
    )


class _WithActivation(ABN):
    """A norm without activation, and a module for it, as in timm."""

    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def _exchange_norms(
    body: LibraryBody, norm_act: NormAct, own_momentum: bool, network: str, instead: str
) -> tuple[str, ...]:
    """Replace batch normalisations by norms with the options of `norm_act`'s, see `LibraryBody`. Returns remarks."""
    template = norm_act(1)
    if type(template) not in (ABN, InPlaceABN):
        kind = type(template).__name__
        raise ValueError(f"norm_act made a {kind}: a network of another library needs ABN or InPlaceABN")
    kept_options = {*_KEPT_NORM_OPTIONS, *(["momentum"] if own_momentum else [])}

    def options(cls: type[nn.Module]) -> dict[str, Any]:
        return {name: getattr(template, name) for name in inspect.signature(cls).parameters if name not in kept_options}

    remarks = _put_norms_in_place(body, network, instead) if isinstance(template, InPlaceABN) else ()
    for parent in list(body.modules()):
        for name, norm in parent.named_children():
            act = timm_activation(norm)
            if type(norm) is InPlaceABN:
                new_norm: ABN = layer_like(norm, InPlaceABN, **options(InPlaceABN))
            elif type(norm) is nn.BatchNorm2d or act is not None:
                new_norm = layer_like(norm, _WithActivation if act else ABN, activation="identity", **options(ABN))
                if act is not None:
                    new_norm.act = act
            else:
                continue
            if not new_norm.learn_scale:
                new_norm.weight = None
            setattr(parent, name, new_norm)
    return remarks


def _put_norms_in_place(body: LibraryBody, network: str, instead: str) -> tuple[str, ...]:
    """Convert the norms that can be in place. Returns remarks. ValueError: there are none."""
    reports: list[ConversionReport] = []
    to_inplace(body, report=reports.append)
    replaced_count = len(reports[0].replaced)
    norm_count = replaced_count + len(reports[0].kept)
    if not replaced_count:
        raise ValueError(f"{network} has no norm that can be in place: {instead}")
    return (f"{replaced_count} of {norm_count} norms are in place; elsewhere it would be wrong or save nothing",)
