"""The user's own images: any folders of images with labels of the same names, and a file that names the classes."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.class_list import CLASSES, EXAMPLE, folder_classes
from datasets.class_table import ClassTable, UnknownIds
from datasets.file_list import class_folders, composed, files_in, is_hidden, list_files, readable
from datasets.label_names import LabelNames
from datasets.layout import PHOTOGRAPHS, Layout, read_list, remarks_on
from datasets.reading import Window, decode_mask, label_palette
from datasets.row import Row
from datasets.segmentation import Files, SegmentationDataset
from datasets.stored import ARRAY_SUFFIX, COLOURS, Stored

WITHHELD = "test"
IN_FOLD = re.compile(r"fold\d+/")  # how the lists of folds begin

# About a label that cannot be used, with its classes.json.
_LABEL_FIX = (
    "Labels hold ids, as PNGs or TIFFs of mode L or P, or the colours of {} as RGB, and are as large as viewers show "
    "their images. Export them again as PNG from your labelling tool, without smoothed edges, resize them with nearest "
    "neighbour, or correct the classes."
)

_LAYOUT = Layout(
    name="folder",
    splits=(),
    tree="""
DIR/classes.json              the classes, in the order of their ids
DIR/train/images/**    or    DIR/images/train/**    or    DIR/images/**             PNG, JPEG, TIFF, BMP, WebP, …
DIR/train/labels/**          DIR/labels/train/**          DIR/labels/**             PNGs or TIFFs of the same names
DIR/val/...                  DIR/images/val/...           DIR/train.txt, val.txt    names of images, one per line
""",
    source="sort your images like this",
)


_USUAL = LabelNames()


def folder_splits(root: str | os.PathLike | None, fold: int | None = None, options: LabelNames = _USUAL) -> list[str]:
    """Names of the splits in `root`, folders and lists, or of one `fold`; train and val come first."""
    root = _LAYOUT.top(root)
    images = root / options.image_folder
    pattern = glob.escape(options.image_folder)
    lists = [file.with_suffix("") for file in _lists(root, images)]
    folders = [path.parent for path in (*root.glob(f"*/{pattern}"), *root.glob(f"*/*/{pattern}"))]
    splits = {path.relative_to(root).as_posix() for path in (*folders, *lists)}
    if not lists:
        splits |= {*split_folders(images)}
    splits = {split for split in splits if not any(map(is_hidden, split.split("/")))}
    if fold is not None:
        names = {split.rpartition("/")[2] for split in splits}
        splits = {name for name in names if split_of_fold(name, fold) in splits}
    return sorted(splits, key=lambda split: (split not in ("train", "val"), split))


def split_folders(images: Path) -> list[str]:
    """The splits that a folder of images holds as folders, of which one is for training: train, val of DIR/images."""
    names = class_folders(images) if images.is_dir() else ()
    return [*names] if any(name.lower().startswith("train") for name in names) else []


def _lists(root: Path, images: Path) -> list[Path]:
    """The text files beside the folder of images that list some of them, such as train.txt or fold0/train.txt."""
    texts = [*root.glob("*.txt"), *root.glob("fold[0-9]*/*.txt")] if images.is_dir() else ()
    return [file for file in texts if _is_list(file, images)]


def _is_list(file: Path, images: Path) -> bool:
    """Whether a text is a list of images: it has a split's name, or one of its first lines names an image."""
    if re.match(r"(train|val|test)", file.stem):
        return True
    with suppress(ValueError):
        names = [line.strip() for line in read_list(file, "the name of an image")[:9]]
        return any((images / f"{name}{end}").is_file() for name in names for end in ("", *PHOTOGRAPHS, ARRAY_SUFFIX))
    return False


def split_of_fold(split: str, fold: int | None) -> str:
    """The split of a fold. A test split is the same for all."""
    return split if fold is None or split == WITHHELD or IN_FOLD.match(split) else f"fold{fold}/{split}"


def folder(
    root: str | os.PathLike | None,
    split: str,
    palettes: str = "equal",
    label_folder: str = "labels",
    label_suffix: str = "",
    fold: int | None = None,
    channels: int = COLOURS,
    shown: Sequence[int] | None = None,
    keys: str = "",
    listed: Sequence[str] | None = None,
    image_folder: str = "images",
) -> SegmentationDataset:
    """A split of a folder: `root`/`split`/images, or `root`/images/`split`, or the images of `root`/images on a list.

    Labels lie in a folder beside images. The list is `root`/`split`.txt; an image that is on it several times counts as
    often. Images and labels are paired by their paths below the two folders; a split "test" may have no labels. Labels
    hold ids, or the classes' colours, on the images as viewers show them: EXIF orientation counts. `label_folder`,
    `image_folder`: the names of the labels' and the images' folders, which may be the same. `label_suffix`: a label's
    name is its image's name plus this, such as "_mask". `palettes`: "equal" refuses labels whose palettes give an id
    different colours, "any" does not compare them. `fold`: read `root`/fold`fold`/`split`.txt instead, except for a
    test. `channels`: of every image; .npy files of three count if there are no other images. `shown`: see
    `SegmentationDataset`. `keys`: prefix of option names in messages. `listed`: the names of images in `root`/images
    for a list that is not written yet; `split` is then empty.
    ValueError if classes.json, a folder, the list, all images or a listed image is missing, or an image has no label.
    """
    options = LabelNames(label_folder, label_suffix, keys, image_folder)
    root = _LAYOUT.top(root)
    options.check()
    split = split_of_fold(split, fold)
    place = _place_of_split(root, split, options)
    images, labels = _images_and_labels(root, split, place, channels, options)
    names: Sequence[str]
    if place.is_list:
        names = listed or names_on_list(root, place.path, images, options)
    else:
        names = [*images]
    files = _pair_labels(root, place, names, images, labels, options)
    files = [entry._replace(name=stored_name(entry, place.images)) for entry in files]
    table = _classes_of(root)
    return SegmentationDataset(
        "folder",
        split,
        files,
        table,
        _label_decoder(table),
        turned=True,
        label_fix=_LABEL_FIX.format(root / CLASSES),
        palette_fix=None if palettes == "any" else palette_fix(keys),
        remarks=_remarks_on_split(root, place, images, labels, has_list=place.is_list and not listed),
        channels=channels,
        channels_key=f"{keys}channels",
        shown=shown,
    )


class _Place(NamedTuple):
    """Where a split lies: its images and labels have folders of their own, or share them with other lists."""

    path: Path  # of its folder in the dataset's, or of its list without .txt
    above: Path  # holds the folder of images and the folder of labels
    images: Path
    labels: Path
    is_list: bool


def _place_of_split(root: Path, split: str, options: LabelNames) -> _Place:
    """Where a split lies, or would be. ValueError if that is not in `root`."""
    if {"/", ".."} & {*Path(split).parts}:
        raise ValueError(f"split {split!r} leads out of {root}: expected a folder or a list in it, such as train")
    path = root / split
    if not path.is_dir() and not Path(f"{path}.txt").is_file():
        same = [name for name in folder_splits(root, options=options) if composed(name) == composed(split)]
        path = root / same[0] if len(same) == 1 else path
    images = root / options.image_folder
    labels = root / options.folder
    has_own_folder = (path / options.image_folder).is_dir() or not images.is_dir()
    if path != root and has_own_folder:  # DIR/train/images
        return _Place(path, path, path / options.image_folder, path / options.folder, is_list=False)
    if split and (images / split).is_dir() and not _lists(root, images):  # DIR/images/train
        return _Place(path, root, images / split, labels / split, is_list=False)
    return _Place(path, root, images, labels, is_list=True)


def _images_and_labels(
    root: Path, split: str, place: _Place, channels: int, options: LabelNames
) -> tuple[dict[str, Path], dict[str, Path]]:
    """{name: path} of the images and of the labels in a split's folders. ValueError: there is no image."""
    if not place.images.is_dir():
        problem = f"folder: the folder {place.images} is missing"
        raise _LAYOUT.error(problem, root, _missing_split_advice(root, options))
    images = options.images(_image_files(place.images, channels))
    if not images:
        raise _LAYOUT.no_images(root, place.images, image_suffixes(channels), split, deep=True)
    return images, options.labels(place.labels)


def _pair_labels(
    root: Path,
    place: _Place,
    names: Sequence[str],
    images: Mapping[str, Path],
    labels: Mapping[str, Path],
    options: LabelNames,
) -> list[Files]:
    """The images of a split with their labels; a split "test" may have none. ValueError: an image has no label."""
    unlabelled = {name: images[name] for name in names if name not in labels}
    looked_for = f"{place.labels}/NAME{options.suffix}.png"
    has_labels = bool(labels.keys() & {*names} if place.is_list else labels)
    if not unlabelled or (place.path.name == WITHHELD and not has_labels):
        return _LAYOUT.pair_listed(names, images, None if unlabelled else labels, root, looked_for)
    inside = place.images.relative_to(place.above / options.image_folder)
    fix = options.advice(place.above, {(inside / name).as_posix(): images[name] for name in names})
    fix = fix or "add the labels, under the names of their images, or take the images out"
    if not place.labels.is_dir():
        raise _LAYOUT.error(f"folder: the folder {place.labels} is missing", root, fix)
    return _LAYOUT.pair_listed(names, images, labels, root, looked_for, fix)


def _remarks_on_split(
    root: Path, place: _Place, images: Mapping[str, Path], labels: Mapping[str, Path], has_list: bool
) -> tuple[str, ...]:
    """Remarks on what a split leaves out. `has_list`: its list is written, so labelled images may be on none."""
    used_paths = {*map(str, (*images.values(), *labels.values()))}
    labelled = {name: path for name, path in images.items() if name in labels}
    return remarks_on(
        [path for name, path in labels.items() if name not in images],
        [entry.path for _, entry in files_in(place.images) if entry.path not in used_paths],
        names_on_no_list(root, place.path, labelled) if has_list else [],
    )


def _classes_of(root: Path) -> ClassTable:
    """The classes of a folder. ValueError: its classes.json is missing, or of another form."""
    file = root / CLASSES
    if not file.is_file():
        problem = "a link that leads nowhere" if file.is_symlink() else "missing"
        fix = f"write {EXAMPLE} there, or let python -m scripts.make_classes write what the labels hold"
        raise _LAYOUT.error(f"folder: {file} is {problem}", root, fix)
    return folder_classes(file)


def image_suffixes(channels: int) -> tuple[str, ...]:
    """The suffixes of images of a number of channels."""
    return PHOTOGRAPHS if channels == COLOURS else (*PHOTOGRAPHS, ARRAY_SUFFIX)


def _image_files(folder: Path, channels: int) -> dict[str, Path]:
    """{name: path} of the images in a folder. Arrays of three channels count if there is no other image."""
    return list_files(folder, image_suffixes(channels), deep=True) or list_files(folder, [ARRAY_SUFFIX], deep=True)


def palette_fix(keys: str = "") -> str:
    """What to do about labels whose palettes differ. `keys`: prefix of option names."""
    return (
        f"Export all labels with one palette, or give {keys}palettes=any: their ids then count, whatever the colours."
    )


def stored_name(entry: Files, folder: Path) -> str:
    """The name of an image as its file has it below a folder: accents may be letters of their own there."""
    path = str(entry.image.relative_to(folder))
    return path.removesuffix(entry.image.suffix) if composed(path) != path else entry.name


class LabelFiles(NamedTuple):
    """All labels in a folder, of every split."""

    images: dict[Path, Path | None]  # of each label that counts; None if there is no folder of images
    unpaired: list[Path]  # labels without an image
    unlabelled: list[Path]  # images without a label, unless no image of a split "test" has one
    folder: Path  # of the images that lists may name
    listable: dict[str, Path]  # these images, by name
    labelled: dict[str, Path]  # those of them that have labels


def check_whole(root: str | os.PathLike | None, options: LabelNames = _USUAL) -> None:
    """ValueError if a folder looks like one of several splits beside each other, such as DIR/train of DIR."""
    top = _LAYOUT.top(root).resolve()
    beside = [] if folder_splits(top, options=options) else _splits_beside(top, options)
    if beside:
        raise ValueError(
            f"{top} looks like one of the splits {', '.join(beside)} of {top.parent}: give {top.parent}, whose "
            f"{CLASSES} counts for all; or first write lists of its images, if it is a dataset of its own"
        )


def _splits_beside(top: Path, options: LabelNames) -> list[str]:
    """The names of a split's folder and of those beside it; empty if `top` looks like another folder."""
    splits = [split for split in folder_splits(top.parent, options=options) if "/" not in split]
    is_split = top.name in splits and len(splits) > 1 and {"train", "val", WITHHELD} & {*splits}
    return splits if is_split else []


def folder_labels(root: str | os.PathLike | None, options: LabelNames = _USUAL, channels: int = COLOURS) -> LabelFiles:
    """Find all labels in a folder. `channels`: of its images. ValueError if there are none."""
    root = _LAYOUT.top(root)
    options.check()
    label_files = LabelFiles({}, [], [], root / options.image_folder, {}, {})
    images_above = dict[Path, dict[str, Path]]()  # by the folder above them, where some have no label
    for above in _folders_holding(root, {options.image_folder, options.folder}):
        labels = options.labels(above / options.folder)
        image_folder = above / options.image_folder
        if not image_folder.is_dir():
            label_files.images.update(dict.fromkeys(labels.values()))
            continue
        images = options.images(_image_files(image_folder, channels))
        label_files.images.update({path: images[name] for name, path in labels.items() if name in images})
        label_files.unpaired.extend(path for name, path in labels.items() if name not in images)
        if above == root:
            label_files.listable.update(images)
            label_files.labelled.update({name: path for name, path in images.items() if name in labels})
        unlabelled = [path for name, path in images.items() if name not in labels]
        if labels or above.name != WITHHELD:
            label_files.unlabelled.extend(unlabelled)
        if unlabelled:
            images_above[above] = images
    if not label_files.images:
        labels_missing = "no labels of an image" if label_files.unpaired else "no labels"
        advice = filter(None, (options.advice(above, images) for above, images in images_above.items()))
        fix = next(advice, None) or _folder_above_advice(root, options) or options.twins_advice(root)
        raise _LAYOUT.error(f"folder: {labels_missing} in {root}", root, fix)
    return label_files


def _folder_above_advice(root: Path, options: LabelNames) -> str | None:
    """Advice to give the folder of the dataset if a folder in it was given."""
    above = root.resolve().parent
    if not (above / options.image_folder).is_dir():
        return None
    return f"give {options.keys}root={above.parent if _splits_beside(above, options) else above}, the folder above"


def _folders_holding(root: Path, names: Set[str]) -> Iterator[Path]:
    """`root` and all folders below it, sorted, that have a folder with one of `names`, whose folders do not count.

    Links are followed, as for splits, but no folder is visited twice: links may form a circle.
    """
    seen_paths: set[str] = set()
    for folder, inside, _ in os.walk(root, followlinks=True):
        real_path = os.path.realpath(folder)
        folders = [] if real_path in seen_paths else sorted(name for name in inside if not is_hidden(name))
        seen_paths.add(real_path)
        inside[:] = [name for name in folders if name not in names]
        if len(inside) < len(folders):
            yield Path(folder)


def _missing_split_advice(root: Path, options: LabelNames) -> str | None:
    """Advice about a split that is missing: others in `root`, the folder above, or the command that writes lists."""
    splits = folder_splits(root, options=options)
    above = root.resolve()
    keys = options.keys
    ways = []
    images = root / options.image_folder
    if any(map(IN_FOLD.match, splits)):
        ways.append(f"give {keys}fold=0, or another of the folds that are there (eval.py: data.split=fold0/val)")
    labelled = [split for split in splits if not IN_FOLD.match(split) and _may_have_labels(root, split, options)]
    if labelled:
        ways.append(f"give one of the splits that are there: {', '.join(labelled)}")
    if len(labelled) == 1 and (root / labelled[0] / options.image_folder).is_dir():
        command = f"scripts.make_classes {_named(options)}split=[0.8,0.2]"
        ways.append(f"hold out some of its images: with {keys}root={root / labelled[0]}, let {command} write lists")
    twins = None if splits or images.is_dir() else options.twins_advice(root)
    if twins:
        ways.append(twins)
    elif not splits and _splits_beside(above, options):
        ways.append(f"give {keys}root={above.parent}, the folder above, whose folders are the splits")
    elif images.is_dir() and not split_folders(images):
        ways += _ways_to_lists(root, options)
    return "; or ".join(ways) or None


def _may_have_labels(root: Path, split: str, options: LabelNames) -> bool:
    """Whether a split is a list, or has a folder of labels."""
    folders = (root / split / options.folder, root / options.folder / split)
    return Path(root, f"{split}.txt").is_file() or any(map(Path.is_dir, folders))


def _ways_to_lists(root: Path, options: LabelNames) -> Iterator[str]:
    """How a folder of images gets lists: from where Pascal VOC has them, if they are there, or from our command."""
    lists = sorted(root.glob("ImageSets/*/train*.txt"))
    if lists:
        yield f"copy the lists of {lists[0].parent} to {root}"
    command = f"python -m scripts.make_classes data.root={root} {_named(options)}split=[0.7,0.15,0.15]"
    yield f"let {command} write lists, or with folds=5 those of five folds"


def _named(options: LabelNames) -> str:
    """The names of folders and labels, as a command gives them before other options; "" if they are the usual ones."""
    words = options._replace(keys="data.").words(_USUAL)
    return words and f"{words} "


def names_on_list(root: Path, split_path: Path, images: Mapping[str, Path], options: LabelNames = _USUAL) -> list[str]:
    """The image names on a split's list, which may list suffixes too. `split_path`: where its folder would be."""
    file = Path(f"{split_path}.txt")
    if not file.is_file():
        neither = f"folder: neither the folder {split_path / options.image_folder} nor the list {file} exists"
        raise _LAYOUT.error(neither, root, _missing_split_advice(root, options))
    names = _read_names(file, images)
    fix = (
        f"give one path below {root / options.image_folder} a line, such as {readable(min(images))}, without a label "
        f"beside it; take out lines of images that are not there"
    )
    _LAYOUT.check_list(file, names, images, root, fix)
    return names


def _read_names(file: Path, images: Mapping[str, Path]) -> list[str]:
    """The names on a list, without the suffixes of `images`."""
    lines = [composed(line).removeprefix("./") for line in read_list(file, "the name of an image")]
    stems = {f"{name}{end}": name for name, path in images.items() for end in ("", path.suffix)}
    stripped = {line: stems.get(line.strip()) for line in lines}  # a name may end in a blank, or the line alone
    return [stems.get(line) or stripped[line] or line for line in lines]


def names_on_no_list(root: Path, split_path: Path, images: Mapping[str, Path]) -> list[str]:
    """The names of `images` in `root`/images that are on none of the lists beside `split_path`.txt, sorted.

    All folds share `root`/test.txt, so it counts for each of them.
    """
    is_withheld = split_path.name == WITHHELD
    above = root if is_withheld else split_path.parent
    lists = {*above.glob("*.txt"), root / f"{WITHHELD}.txt"}
    if is_withheld:
        lists |= {*root.glob("fold[0-9]*/*.txt")}
    names = set[str]()
    for file in filter(Path.is_file, lists):
        with suppress(ValueError):  # another text
            names.update(_read_names(file, images))
    return sorted(images.keys() - names)


def _label_decoder(table: ClassTable) -> Callable[[Stored, Window], np.ndarray]:
    """`_decode_ids` for labels of these classes: colours, or ids in one or three equal channels."""
    ids = table.label_colours or {0x010101 * number: number for number in table.label_ids}
    levels = [table.id_of_gray(gray) for gray in range(256)]
    cure = "" if table.label_colours else f"; no class in {CLASSES} has a colour: scripts.make_classes overwrite=true"
    return partial(_decode_ids, ids, np.array(levels, np.uint8), cure)


def _decode_ids(ids: Mapping[int, int], levels: np.ndarray, cure: str, file: Stored, window: Window) -> np.ndarray:
    """A label's ids, uint8 (H, W). `ids` is {0xRRGGBB: id}; `cure` ends the message on other colours.

    `levels`, uint8 (256,), maps gray values to ids: a value that is no id may be the gray that is a class's colour.
    """
    raw = decode_mask(file, window)
    if raw.dtype == np.uint8:
        return raw if label_palette(file) else levels[raw]
    colours = np.array(sorted(ids) or [-1], np.int32)  # -1: no pixel has it, but a search needs an entry
    places = np.searchsorted(colours, raw).clip(max=len(colours) - 1)
    foreign = np.unique(raw[colours[places] != raw])
    if foreign.size:
        named = ", ".join(str(tuple(int(code).to_bytes(3, "big"))) for code in foreign[:5])
        raise UnknownIds(f"contains {len(foreign)} colours that no class has, such as {named}{cure}")
    return np.array([ids.get(code, 0) for code in colours.tolist()], np.uint8)[places]


FOLDER = Row(
    folder,
    lambda root, fold, image_folder, **_: dict.fromkeys(
        folder_splits(root, fold, LabelNames(image_folder=image_folder))
    ),
    classes=None,
)
