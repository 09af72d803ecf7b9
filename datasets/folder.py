"""The user's own images: any folders of images with labels of the same names, and a file that names the classes."""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.channels import ARRAY
from datasets.class_names import check_names
from datasets.class_table import ClassTable, UnknownIds, distinct_colours, rgb
from datasets.file_list import class_folders, composed, files_in, is_hidden, list_files, readable
from datasets.label_names import LabelNames
from datasets.layout import PHOTOGRAPHS, RARE, Layout, as_listed, read_json, read_list, remarks_on
from datasets.reading import COLOURS, Stored, Window, decode_mask, label_palette
from datasets.row import Row
from datasets.segmentation import Files, SegmentationDataset

CLASSES = "classes.json"
TRAINED = range(2, 254)  # classes; a single one leaves nothing to learn
WITHHELD = "test"
IN_FOLD = re.compile(r"fold\d+/")  # how the lists of folds begin
ALSO = (*RARE, ARRAY)  # images where no other has their name, see `list_files`
_IGNORED = 255  # unless the file says otherwise
_LONGEST_NAME = 255  # of a class

Colour = tuple[int, int, int]
_EXAMPLE = '{"classes": [{"name": "wood", "colour": [120, 80, 40]}, {"name": "bark"}, …], "ignored": [255]}'

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


def folder_classes(file: Path) -> ClassTable:
    """The classes of a file classes.json.

    A class's position is its id. Ids in "ignored" are not trained, nor are the classes that have them. Predictions hold
    ids, as PNGs with the classes' colours, unless these are `alike`. ValueError for a file of another form.
    """
    try:
        content = read_json(file)
        if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content["classes"]):
            raise ValueError('every class needs an object, such as {"name": "wood"}')
        if not isinstance(content.get("ignored", []), list):
            raise ValueError(f'"ignored" is {content["ignored"]}, expected a list of ids, such as [{_IGNORED}]')
        if wrong := [number for number in content.get("ignored", []) if number not in range(256)]:
            raise ValueError(f'"ignored" has {wrong[0]!r}, expected ids from 0 to 255')
        if len(content["classes"]) > 256:
            raise ValueError(f"the number of classes is {len(content['classes'])}, expected at most 256")
        entries, ignored = content["classes"], sorted(bytes(content.get("ignored", [_IGNORED])))
        keys = {*content} - {"classes", "ignored"} | {key for entry in entries for key in entry}
        if unknown := sorted(keys - {"name", "colour"}):
            raise ValueError(f"the key {unknown[0]!r} is unknown")
        colours = {
            number: rgb(entry["colour"]) for number, entry in enumerate(entries) if entry.get("colour") is not None
        }
        ids = [number for number in range(len(entries)) if number not in ignored]
        names = tuple(entries[number]["name"] for number in ids)
        check_names(zip(ids, names, strict=True))
        if long := [name for name in names if len(name) > _LONGEST_NAME]:
            raise ValueError(f"a name has {len(long[0]):,} characters, expected at most {_LONGEST_NAME}")
        for what, values in (("names", names), ("colours", tuple(colours.values()))):
            if repeated := sorted({str(value) for value in values if values.count(value) > 1}):
                raise ValueError(f"two {what} are {repeated[0]}, expected different ones")
        if len(ids) not in TRAINED:
            raise ValueError(f"the number of classes that are not ignored is {len(ids)}, expected 2 to 253")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: cannot be read as a list of classes ({type(error).__name__}: {error}); expected {_EXAMPLE}"
        ) from None
    return ClassTable(
        names=names,
        palette=told_apart({number: colours.get(number) for number in ids}),
        official_ids=tuple(ids),
        label_ids={**dict.fromkeys(ignored, 255), **{number: train_id for train_id, number in enumerate(ids)}},
        label_colours={int.from_bytes(colour, "big"): number for number, colour in colours.items()},
        official_void=ignored[0] if ignored else _IGNORED,
        coloured_predictions=True,
        ignored_by=f'"ignored" in {file}',
        ignored=tuple(number for number in ignored if number < len(entries)),
    )


def alike(colours: Mapping[int, Sequence[int]]) -> set[int]:
    """Classes whose colour looks like another class's: every channel differs by less than 8 levels."""
    near = _near([*colours.values()], [*colours.values()])
    return {number for number, count in zip(colours, near.sum(axis=1), strict=True) if count > 1}


def told_apart(colours: Mapping[int, Colour | None]) -> tuple[Colour, ...]:
    """One colour per class: its own, or a spare one if it has none or its own looks like another class's."""
    own = {number: colour for number, colour in colours.items() if colour is not None}
    found = {number: own[number] for number in own.keys() - alike(own)}
    # Each colour is near at most one colour of the grid, so enough of these are left.
    levels = range(20, 256, 32)
    spare = [*distinct_colours(256), *product(levels, levels, levels)]
    for number in sorted(colours.keys() - found.keys()):
        near = _near([spare[number], *spare], [*found.values()]).any(axis=1)
        found[number] = [spare[number], *spare][int(near.argmin())]
    return tuple(found[number] for number in colours)


def _near(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> np.ndarray:
    """Which pairs of colours look alike, bool (n, m)."""
    levels, other_levels = (np.array(each, np.int16).reshape(-1, 3) for each in (some, others))
    return (np.abs(levels[:, None] - other_levels) < 8).all(axis=2)


_USUAL = LabelNames()


def folder_splits(root: str | os.PathLike | None, fold: int | None = None, options: LabelNames = _USUAL) -> list[str]:
    """Names of the splits in `root`, folders and lists, or of one `fold`; train and val come first."""
    root, name = _LAYOUT.top(root), glob.escape(options.image_folder)
    images = root / options.image_folder
    lists = [file.with_suffix("") for file in _lists(root, images)]
    folders = [path.parent for pattern in (f"*/{name}", f"*/*/{name}") for path in root.glob(pattern)]
    found = {path.relative_to(root).as_posix() for path in (*folders, *lists)}
    found |= set() if lists else {*split_folders(images)}
    found -= {name for name in found if any(map(is_hidden, name.split("/")))}
    if fold is not None:
        inside = {name.rpartition("/")[2] for name in found}
        found = {name for name in inside if of_fold(name, fold) in found}
    return sorted(found, key=lambda split: (split not in ("train", "val"), split))


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
        return any((images / f"{name}{end}").is_file() for name in names for end in ("", *PHOTOGRAPHS, *ALSO))
    return False


def of_fold(split: str, fold: int | None) -> str:
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
    test. `channels`: of every image; a .npy file of three counts if no image has its name. `shown`: see
    `SegmentationDataset`. `keys`: prefix of option names in messages. `listed`: the names of images in `root`/images
    for a list that is not written yet; `split` is then empty.
    ValueError if classes.json, a folder, the list, all images or a listed image is missing, or an image has no label.
    """
    options, split = LabelNames(label_folder, label_suffix, keys, image_folder), of_fold(split, fold)
    root = _LAYOUT.top(root)
    options.check()
    own, all_images = _below(root, split, options), root / image_folder
    has_list = not split or bool(_lists(root, all_images))
    above = root if all_images.is_dir() and not (own / image_folder).is_dir() else own
    inside = split if above == root and not has_list and (all_images / split).is_dir() else ""  # DIR/images/train
    is_listed, images_in, looked_in = above == root and not inside, above / image_folder / inside, above / label_folder
    looked_in = looked_in / inside
    if not images_in.is_dir():
        raise _LAYOUT.error(f"folder: the folder {images_in} is missing", root, _elsewhere(root, options))
    suffixes = image_suffixes(channels)
    found = _LAYOUT.files(root, images_in, suffixes, images_of=split, deep=True, more=ALSO)
    images, labels = options.images(found), options.labels(looked_in)
    is_test = own.name == WITHHELD
    alone = [path for name, path in labels.items() if name not in images]
    labelled = {name: path for name, path in images.items() if name in labels}
    if not is_listed and labels:  # one without a label is passed over, as before its suffix was read
        known = {name: path for name, path in images.items() if name in labels or path.suffix.lower() in suffixes}
        images = known or images
    used = {*map(str, (*images.values(), *labels.values()))}
    others = [entry.path for _, entry in files_in(images_in) if entry.path not in used]
    chosen = list(listed or images) if not is_listed or listed else on_list(root, own, images, options)
    if is_listed:
        images, labels = ({name: found[name] for name in chosen if name in found} for found in (images, labels))
    if is_test and not labels:
        files = [Files(name, path) for name, path in images.items()]
    elif looked_in.is_dir() and images.keys() <= labels.keys():
        files = [Files(name, image, labels[name]) for name, image in images.items()]
    else:
        below = {f"{inside}/{name}" if inside else name: path for name, path in images.items()}
        fix = options.found(above, below) or "add the labels, under the names of their images, or take the images out"
        if not looked_in.is_dir():
            raise _LAYOUT.error(f"folder: the folder {looked_in} is missing", root, fix)
        files, _ = _LAYOUT.pair(images, labels, root, f"{looked_in}/NAME{label_suffix}.png", fix)  # raises
    if not (classes := root / CLASSES).is_file():
        what = "a link that leads nowhere" if classes.is_symlink() else "missing"
        fix = f"write {_EXAMPLE} there, or let python -m scripts.make_classes write what the labels hold"
        raise _LAYOUT.error(f"folder: {classes} is {what}", root, fix)
    fix = (
        f"Labels hold ids, as PNGs or TIFFs of mode L or P, or the colours of {classes} as RGB, and are as large as "
        f"viewers show their images. Export them again as PNG from your labelling tool, without smoothed edges, resize "
        f"them with nearest neighbour, or correct the classes."
    )
    table = folder_classes(classes)
    levels = [id if id in table.label_ids else table.label_colours.get(0x010101 * id, id) for id in range(256)]
    colours = table.label_colours or {0x010101 * id: id for id in table.label_ids}  # or ids in three equal channels
    decode = partial(_decode, colours, np.array(levels, np.uint8))
    different = None if palettes == "any" else palette_fix(keys)
    files = [entry._replace(name=as_stored(entry, images_in)) for entry in as_listed(files, chosen)]
    left_out = [] if not is_listed or listed else on_no_list(root, own, labelled)
    remarks = remarks_on(alone, others, [entry.image for entry in files], unlisted=left_out)
    return SegmentationDataset(
        "folder",
        split,
        files,
        table,
        decode,
        turned=True,
        label_fix=fix,
        palette_fix=different,
        remarks=remarks,
        channels=channels,
        channels_key=f"{keys}channels",
        shown=shown,
    )


def image_suffixes(channels: int) -> tuple[str, ...]:
    """The suffixes of images of a number of channels."""
    return PHOTOGRAPHS if channels == COLOURS else (*PHOTOGRAPHS, ARRAY)


def palette_fix(keys: str = "") -> str:
    """What to do about labels whose palettes differ. `keys`: prefix of option names."""
    return (
        f"Export all labels with one palette, or give {keys}palettes=any: their ids then count, whatever the colours."
    )


def _below(root: Path, split: str, options: LabelNames) -> Path:
    """The folder of a split, or where it would be. ValueError if it is not in `root`."""
    if {"/", ".."} & {*Path(split).parts}:
        raise ValueError(f"split {split!r} leads out of {root}: expected a folder or a list in it, such as train")
    below = root / split
    if below.is_dir() or Path(f"{below}.txt").is_file():
        return below
    same = [found for found in folder_splits(root, options=options) if composed(found) == composed(split)]
    return root / same[0] if len(same) == 1 else below


def as_stored(entry: Files, folder: Path) -> str:
    """The name of an image as its file has it below a folder: accents may be letters of their own there."""
    path = str(entry.image.relative_to(folder))
    return path.removesuffix(entry.image.suffix) if composed(path) != path else entry.name


class LabelFiles(NamedTuple):
    """All labels in a folder, of every split."""

    images: dict[Path, Path | None]  # of each label that counts; None if there is no folder of images
    alone: list[Path]  # labels without an image
    without: list[Path]  # images without a label, unless no image of a split "test" has one
    folder: Path  # of the images that lists may name


def check_whole(root: str | os.PathLike | None, options: LabelNames = _USUAL) -> None:
    """ValueError if a folder looks like one of several splits beside each other, such as DIR/train of DIR."""
    top = _LAYOUT.top(root).resolve()
    if not folder_splits(top, options=options) and (beside := _beside(top, options)):
        raise ValueError(
            f"{top} looks like one of the splits {', '.join(beside)} of {top.parent}: give {top.parent}, whose "
            f"{CLASSES} counts for all; or first write lists of its images, if it is a dataset of its own"
        )


def _beside(top: Path, options: LabelNames) -> list[str]:
    """The names of a split's folder and of those beside it; empty if `top` looks like another folder."""
    splits = [split for split in folder_splits(top.parent, options=options) if "/" not in split]
    looks_so = top.name in splits and len(splits) > 1 and {"train", "val", WITHHELD} & {*splits}
    return splits if looks_so else []


def folder_labels(root: str | os.PathLike | None, options: LabelNames = _USUAL, channels: int = COLOURS) -> LabelFiles:
    """Find all labels in a folder. `channels`: of its images. ValueError if there are none."""
    root = _LAYOUT.top(root)
    options.check()
    found, fix = LabelFiles({}, [], [], root / options.image_folder), None
    for above in _folders(root, {options.image_folder, options.folder}):
        labels, images = options.labels(above / options.folder), None
        if (folder := above / options.image_folder).is_dir():
            images = options.images(list_files(folder, image_suffixes(channels), deep=True, more=ALSO))
            without = [path for name, path in images.items() if name not in labels]
            found.without.extend(without if labels or above.name != WITHHELD else ())
            fix = fix or (options.found(above, images) if without else None)
        for name, label in labels.items():
            if images is None or name in images:
                found.images[label] = None if images is None else images[name]
            else:
                found.alone.append(label)
    if not found.images:
        if (above := root.resolve().parent / options.image_folder).is_dir():
            whole = above.parent.parent if _beside(above.parent, options) else above.parent
            fix = fix or f"give {options.keys}root={whole}, the folder above"
        fix = fix or options.twins(root)
        raise _LAYOUT.error(f"folder: no labels{' of an image' * bool(found.alone)} in {root}", root, fix)
    return found


def _folders(root: Path, names: Set[str]) -> Iterator[Path]:
    """`root` and all folders below it, sorted, that have a folder with one of `names`, whose folders do not count.

    Links are followed, as for splits, but no folder is visited twice: links may form a circle.
    """
    seen: set[str] = set()
    for folder, inside, _ in os.walk(root, followlinks=True):
        is_new = (real := os.path.realpath(folder)) not in seen
        seen.add(real)
        others = sorted(each for each in inside if is_new and not is_hidden(each))
        inside[:] = [each for each in others if each not in names]
        if len(inside) < len(others):
            yield Path(folder)


def _elsewhere(root: Path, options: LabelNames) -> str | None:
    """Advice about a split that is missing: others in `root`, the folder above, or the command that writes lists."""
    splits, above, ways, keys = folder_splits(root, options=options), root.resolve(), list[str](), options.keys
    images = root / options.image_folder
    whole = [split for split in splits if not re.match(r"fold\d+/", split)]
    if len(whole) < len(splits):
        ways.append(f"give {keys}fold=0, or another of the folds that are there (eval.py: data.split=fold0/val)")
    if whole:
        ways.append(f"give one of the splits that are there: {', '.join(whole)}")
    if not splits and not images.is_dir() and (twins := options.twins(root)):
        ways.append(twins)
    elif not splits and _beside(above, options):
        ways.append(f"give {keys}root={above.parent}, the folder above, whose folders are the splits")
    elif images.is_dir() and not split_folders(images):
        if lists := sorted(root.glob("ImageSets/*/train*.txt")):
            ways.append(f"copy the lists of {lists[0].parent} to {root}")
        command = f"python -m scripts.make_classes data.root={root} split=[0.7,0.15,0.15]"
        ways.append(f"let {command} write lists, or with folds=5 those of five folds")
    return "; or ".join(ways) or None


def on_list(root: Path, own: Path, images: Mapping[str, Path], options: LabelNames = _USUAL) -> list[str]:
    """The image names on a split's list, which may list suffixes too. `own`: where the split's folder would be."""
    file = Path(f"{own}.txt")
    if not file.is_file():
        neither = f"folder: neither the folder {own / options.image_folder} nor the list {file} exists"
        raise _LAYOUT.error(neither, root, _elsewhere(root, options))
    names = _names_on(file, images)
    fix = (
        f"give one path below {root / options.image_folder} a line, such as {readable(min(images))}, without a label "
        f"beside it; take out lines of images that are not there"
    )
    _LAYOUT.check_list(file, names, images, root, fix)
    return names


def _names_on(file: Path, images: Mapping[str, Path]) -> list[str]:
    """The names on a list, without the suffixes of `images`."""
    lines = [composed(line).removeprefix("./") for line in read_list(file, "the name of an image")]
    stems = {f"{name}{end}": name for name, path in images.items() for end in ("", path.suffix)}
    stripped = {line: stems.get(line.strip()) for line in lines}  # a name may end in a blank, or the line alone
    return [stems.get(line) or stripped[line] or line for line in lines]


def on_no_list(root: Path, own: Path, images: Mapping[str, Path]) -> list[str]:
    """The names of `images` in `root`/images that are on none of the lists beside `own`.txt, sorted.

    All folds share `root`/test.txt, so it counts for each of them.
    """
    beside = own.parent if own.name != WITHHELD else root
    lists = {*beside.glob("*.txt"), root / f"{WITHHELD}.txt"}
    lists |= {*root.glob("fold[0-9]*/*.txt")} if own.name == WITHHELD else set()
    names = set[str]()
    for file in filter(Path.is_file, lists):
        with suppress(ValueError):  # another text
            names.update(_names_on(file, images))
    return sorted(images.keys() - names)


def _decode(ids: Mapping[int, int], levels: np.ndarray, file: Stored, window: Window) -> np.ndarray:
    """A label's ids, uint8 (H, W). `ids` is {0xRRGGBB: id}.

    `levels`, uint8 (256,), maps gray values to ids: a value that is no id may be the gray that is a class's colour.
    """
    raw = decode_mask(file, window)
    if raw.dtype == np.uint8:
        return raw if label_palette(file) else levels[raw]
    known = np.array(sorted(ids) or [-1], np.int32)
    places = np.searchsorted(known, raw).clip(max=len(known) - 1)
    if (foreign := np.unique(raw[known[places] != raw])).size:
        named = ", ".join(str(tuple(int(code).to_bytes(3, "big"))) for code in foreign[:5])
        raise UnknownIds(f"contains {len(foreign)} colours that no class has, such as {named}")
    return np.array([ids.get(code, 0) for code in known.tolist()], np.uint8)[places]


FOLDER = Row(
    folder,
    lambda root, fold, image_folder, **_: dict.fromkeys(
        folder_splits(root, fold, LabelNames(image_folder=image_folder))
    ),
    classes=None,
)
