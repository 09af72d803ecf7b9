"""Networks of torchvision and timm as bodies: under their own names, dilated, with our norms."""

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

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


class FeatureEnd(NamedTuple):
    """A feature, and where it ends."""

    feature: Feature
    part_count: int  # parts that make it
    is_channels_last: bool  # it is made as (N, H, W, C)


class LibraryBody(Body):
    """The features of a classification network of another library: its modules run one after the other.

    Parameters keep their names and shapes, so the library's weights fit. With standard norms and ReLU, features are the
    library's. Another activation of the norms replaces its ReLUs and ReLU6s; other activations stay. In-place norms are
    used where `to_inplace` can, standard ones elsewhere, each keeping its eps. Images are padded with zeros to a
    multiple of the output stride if the network would round sizes down, or refuse them.

    Args (in addition to `Body`):
        make: name of a network and number of its images' channels -> its modules by name, in the order in which they
            run.
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
        make: Callable[[str, int], Mapping[str, nn.Module]],
        network: str,
        last: str | None = None,
        own_momentum: bool = False,
        instead: str = "use ABN",
    ):
        super().__init__()
        default_tensor = torch.empty(0)  # on the default device, perhaps fake
        # Constructors and examples compute with values, which fake and meta tensors lack.
        with with_dispatch_modes_off(), torch.device("cpu"):
            layers = dict(make(network, in_channels))
            self.left_out = () if last is None else _cut_after(layers, last, f"last={last}: {network}")
            for name, layer in layers.items():
                self.add_module(name, layer)
            self.order = tuple(layers)
            example = torch.zeros(1, in_channels, SIDE, SIDE)
            self._ends = _dilate(self.eval().parts(), example, output_stride, network)
            self._feature_info = tuple(end.feature for end in self._ends)
            last_feature = self._ends[-1].feature
            self.output_stride = last_feature.stride
            self.rounds_up = self._rounds_up(in_channels)
            self.classifier = None  # examples run the features alone
            ends = (f"ends with {last}; without {', '.join(self.left_out)}",) if last is not None else ()
            activation_remarks = _exchange_activations(self, norm_act)
            norm_remarks = _exchange_norms(self.train(), norm_act, own_momentum, network, instead)
            self.remarks = ends + activation_remarks + norm_remarks
            self.add_classifier(last_feature.channels, classes)
            if self.classifier is not None:
                initialise(self.classifier)
        if type(default_tensor) is not Tensor or default_tensor.is_meta:
            self._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        else:
            self.to(default_tensor.device)

    @torch.no_grad()
    def _rounds_up(self, in_channels: int) -> bool:
        """Whether the network rounds sizes up: one pixel more leaves a remainder at every stride."""
        try:
            maps = self._unpadded_maps(torch.zeros(1, in_channels, SIDE + 1, SIDE + 1), [len(self._ends)])
        except Exception:  # a module may raise anything: DLA's shortcuts round down, its convolutions up
            return False
        return maps[0].shape[2] == SIDE // self.output_stride + 1

    def maps(self, images: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """See `Body.maps`. ValueError: a later part writes over one of them."""
        if not self.rounds_up:
            height, width = images.shape[2:]
            images = F.pad(images, (0, -width % self.output_stride, 0, -height % self.output_stride))
        return self._unpadded_maps(images, ends)

    def _unpadded_maps(self, images: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """`maps` of images whose sizes the network does not round down."""
        feature_ends = [self._ends[end - 1] for end in ends]
        bounds = pairwise([0, *(end.part_count for end in feature_ends)])
        segments = [partial(self._run_parts, begin, end) for begin, end in bounds]
        features = [x for (x,) in run_blocks(segments, images, "none", range(1, len(segments) + 1))]
        return [x.movedim(-1, 1) if end.is_channels_last else x for x, end in zip(features, feature_ends, strict=True)]

    def _run_parts(self, begin: int, end: int, x: Tensor) -> Tensor:
        """Run parts from `begin` to `end`. Layers before the first block and after the last are never checkpointed.

        With `sqrt`, L is the number of blocks between two features."""
        if self.recompute == "none":
            return chain(*self._modules_between(begin, end), x)
        parts = [*self.parts().values()]
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
            parts = [*_parts_of(name, module).values()]
            is_whole = begin <= index and index + len(parts) <= end
            modules += [module] if is_whole else parts[max(begin - index, 0) : max(end - index, 0)]
            index += len(parts)
        return modules

    def parts(self) -> dict[str, nn.Module]:
        """The blocks, and the single layers before and after them, by name, in the order in which they run."""
        return {name: part for module in self.order for name, part in _parts_of(module, getattr(self, module)).items()}


def _torchvision_layers(network: str, in_channels: int) -> dict[str, nn.Module]:
    from torchvision import models

    _check_name(network, models.list_models(models), "torchvision")
    whole = models.get_model(network, weights=None)
    if in_channels != 3:
        _exchange_input(whole, in_channels)
    layers = dict(takewhile(lambda entry: entry[0] not in _HEADS, whole.named_children()))
    return layers | ({"relu": nn.ReLU()} if isinstance(whole, models.DenseNet) else {})  # a function there


def _timm_layers(network: str, in_channels: int) -> dict[str, nn.Module]:
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


def _cut_after(layers: dict[str, Any], last: str, subject: str) -> tuple[str, ...]:
    """Remove the parts after `last` from the layers; return their names. `subject` begins messages."""
    first_name, _, inner = last.partition(".")
    if first_name not in layers:
        raise ValueError(f"{subject} has no such part; expected one of {', '.join(layers)}, or a part of these")
    later_names = [*layers][[*layers].index(first_name) + 1 :]
    for name in later_names:
        del layers[name]
    if inner:
        part = layers[first_name]
        children = part._modules if type(part) is nn.Sequential else {}
        later_names[:0] = [f"{first_name}.{name}" for name in _cut_after(children, inner, subject)]
    return tuple(later_names)


def _check_name(network: str, names: Sequence[str], library: str) -> None:
    if network not in names:
        nearest = ", ".join(difflib.get_close_matches(network, names, n=5, cutoff=0))
        raise ValueError(f"network={network}: {library} has no such network; the nearest are {nearest}")


def _channels_first(square: Tensor) -> Tensor:
    """The features of a square image as (N, C, H, W); Swin's are (N, H, W, C)."""
    return square.movedim(-1, 1) if square.shape[1] == square.shape[2] != square.shape[-1] else square


def _cells(square: Tensor) -> int:
    return _channels_first(square).shape[-1]


def _parts_of(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module that runs them in order, by name; a module of single layers stays whole."""
    in_order = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if not in_order or not any(child._modules for child in module.children()):
        return {name: module}
    parts: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        parts |= _parts_of(f"{name}.{child_name}", child)
    return parts


@torch.no_grad()
def _dilate(parts: Mapping[str, nn.Module], x: Tensor, output_stride: int, network: str) -> list[FeatureEnd]:
    """Turn strides beyond `output_stride` into dilation. Returns the features before each stride, and the last one.

    x: an example, (1, C, SIDE, SIDE). ValueError: see `LibraryBody`.
    """
    dilation = 1
    undilated_kinds = []  # the types of the parts that stride and cannot be dilated
    names = list(parts)
    ends: list[FeatureEnd] = []
    try:
        for part_count, part in enumerate(parts.values()):
            version = x._version
            y = part(x)
            is_overwritten = x._version != version
            if part_count and _cells(y) < _cells(x) and not is_overwritten:
                ends.append(_feature_end(x, names, part_count, ends))
            stride = _cells(x) // _cells(y) if _is_too_coarse(y, output_stride) else 1
            if dilation * stride > 1:
                _dilate_part(part, x, dilation, stride)
                try:
                    y = part(x)
                    dilation *= stride
                except RuntimeError:  # its shortcut pools and still strides
                    undilated_kinds.append(type(part).__name__)
            if _is_too_coarse(y, output_stride):
                undilated_kinds.append(type(part).__name__)
            x = y
        ends.append(_feature_end(x, names, len(names), ends))
    except Exception as error:  # a module may raise anything
        modules = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
        raise ValueError(
            f"{network} does not run its {modules} one after the other ({type(error).__name__}): {_EXPECTED}"
        ) from error
    if SIDE % _cells(x):
        raise ValueError(f"{network} has {_cells(x)} cells for {SIDE} pixels: expected a network that halves exactly")
    if undilated_kinds:
        raise ValueError(_why_not_dilated(network, undilated_kinds[0], output_stride, ends))
    return ends


def _why_not_dilated(network: str, part_kind: str, output_stride: int, ends: Sequence[FeatureEnd]) -> str:
    """Why a network that strides in a part of some kind cannot have an output stride, and what to do."""
    if any(end.is_channels_last for end in ends):
        return (
            f"{network} merges patches and attends within windows, so it can neither be dilated nor take images of "
            f"any size: choose a convolutional network, such as convnext_tiny"
        )
    ours = ", or the body densenet121 of this project" if "densenet" in network else ""
    return (
        f"{network} cannot be dilated to output_stride={output_stride}, because its {part_kind} strides without "
        f"a convolution: give output_stride={ends[-1].feature.stride}{ours}"
    )


def _feature_end(x: Tensor, names: Sequence[str], part_count: int, earlier_ends: Sequence[FeatureEnd]) -> FeatureEnd:
    """The feature `x` of a square image after some of the parts; its name is the largest module's that ends there.

    A module that has an earlier feature is too large.
    """
    name = names[part_count - 1]
    while "." in name:
        parent = name.rpartition(".")[0]
        *_, last_part = (part for part in names if part.startswith((f"{name}.", f"{parent}.")))
        has_feature = any(end.feature.name.startswith(f"{parent}.") for end in earlier_ends)
        if has_feature or not f"{last_part}.".startswith(f"{name}."):
            break
        name = parent
    y = _channels_first(x)
    return FeatureEnd(Feature(name, y.shape[1], SIDE // y.shape[-1]), part_count, y is not x)


def _is_too_coarse(y: Tensor, output_stride: int) -> bool:
    """Whether features of the example have a larger stride than the body is to have."""
    return SIDE > output_stride * _cells(y)


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
    options = inspect.signature(type(template)).parameters.keys() - {*_KEPT_NORM_OPTIONS}
    if own_momentum:
        options.remove("momentum")
    remarks = _put_norms_in_place(body, network, instead) if isinstance(template, InPlaceABN) else ()
    for parent in list(body.modules()):
        for name, norm in parent.named_children():
            act = timm_activation(norm)
            if type(norm) is nn.BatchNorm2d or act is not None:
                norm = layer_like(norm, _WithActivation if act else ABN, activation="identity")
                if act is not None:
                    norm.act = act
                setattr(parent, name, norm)
            if isinstance(norm, ABN):
                for option in options & vars(norm).keys():
                    setattr(norm, option, getattr(template, option))
                if not norm.learn_scale:
                    norm.weight = None
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
