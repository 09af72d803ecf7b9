"""Divides images among lists, such as training and validation, so that each list shows every class about as often."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from datasets.file_list import printable
from datasets.folder import WITHHELD, LabelFiles, names_on_list, names_on_no_list, split_folders
from datasets.layout import first_of

_PIXEL_WEIGHT = 0.1  # beside 1 for the images that hold a class
_SIZE_WEIGHT = 1e3
_WIDTHS = 8, 1000  # divisions that a beam search keeps, at least and at most
_DIVISIONS_TRIED = 200_000  # by a beam search, unless there are few or many sources


def sources_of(
    root: Path, labels: LabelFiles, lists: Iterable[str], parts: int, group: str | None, add: bool = False
) -> dict[str, str]:
    """{image: source} for `lists` in a folder of images and `labels`: the labelled images in `root`/images, by name.

    Images on the list of a test split are left out. An image's source is what the first group of the regular expression
    `group` matches in its name; None: the image itself. `add`: the lists are there, and images of sources on the list
    of a test split are left out, too.
    ValueError: a list, or a split of its name, is there (to `add`: is not); an image cannot be listed, or has no
    source; there are fewer sources than `parts`.
    """
    folder = labels.folder
    _check_lists(root, folder, lists, add)
    has_test_list = (root / f"{WITHHELD}.txt").is_file()
    withheld = names_on_list(root, root / WITHHELD, labels.listable) if has_test_list else ()
    names = sorted(labels.labelled.keys() - {*withheld})
    unprintable = [name for name in names if printable(name) != name]
    if unprintable:
        raise ValueError(f"no list can hold the names of {len(unprintable)} images: rename {first_of(unprintable)}")
    matches = {name: re.search(group or "^(.*)$", name) for name in (*names, *withheld)}
    sources = {name: match[1] for name, match in matches.items() if match is not None and match[1] is not None}
    sourceless = [name for name in names if name not in sources]
    if sourceless:
        count = f"{len(sourceless)} of {len(names)}"
        raise ValueError(f"group={group} finds no source in {count} names: {first_of(sourceless)}")
    test_sources = {sources.get(name) for name in withheld} if add else set()
    sources = {name: sources[name] for name in names if sources[name] not in test_sources}
    source_count = len({*sources.values()})
    if source_count < parts:
        kind = f"images with labels in {folder}" if group is None else f"sources by group={group}"
        raise ValueError(f"there are {source_count} {kind}: expected at least {parts}, one for each list")
    return sources


def _check_lists(root: Path, folder: Path, lists: Iterable[str], add: bool) -> None:
    """ValueError if a list, or a split of its name, is there; to `add`, if a list is not. `folder`: of the images."""
    splits = split_folders(folder)
    if splits:
        raise ValueError(f"{folder} holds the splits {', '.join(splits)} as folders: train on these, without lists")
    for name in lists:
        file = f"{root / name}.txt"
        exists = os.path.lexists(file)
        if add and not exists:
            raise ValueError(f"{file} is missing: add=true adds images to lists that are there")
        if exists and not add:
            advice = "move it elsewhere, or add=true adds new images to the lists"
            raise ValueError(f"{file} is there already, and no list is replaced: {advice}")
        if (root / name / folder.name).is_dir():
            raise ValueError(f"{root / name} is a split already: lists are for images in {folder} alone")


def unlisted_names(root: Path, labels: LabelFiles) -> list[str]:
    """The names of labelled images in `root`/images that are on no list, if there are lists."""
    names = names_on_no_list(root, root / WITHHELD, labels.labelled)
    return names if len(names) < len(labels.labelled) else []


def parts_of(
    root: Path, labels: LabelFiles, lists: Mapping[str, tuple[str, bool]], sources: Mapping[str, str]
) -> dict[str, str]:
    """Map each existing image on a list to its part; to "" if all of its lists are without a part.

    `lists`: {name: (part, whether it holds this part)}. ValueError: a list cannot be read, or two parts have images of
    one source of `sources`.
    """
    parts = dict[str, str]()
    first_of_source = dict[str, tuple[str, str]]()  # the part, and the image
    for stem, (part, holds_part) in lists.items():
        for name in names_on_list(root, root / stem, labels.listable):
            if not holds_part:
                parts.setdefault(name, "")
                continue
            parts[name] = part
            first_part, first = first_of_source.setdefault(sources.get(name, name), (part, name))
            if first_part != part:
                raise ValueError(
                    f"{first} is in {first_part}, and {name}, of the same source, in {part}: correct the lists"
                )
    return parts


def sizes_of(count: int, shares: Sequence[float]) -> np.ndarray:
    """How many of `count` images each part gets, int64 (parts,): by largest remainder, but at least one."""
    exact = count * np.array(shares) / sum(shares)
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: count - sizes.sum()]] += 1
    while not sizes.all():
        sizes[sizes.argmax()] -= 1
        sizes[sizes.argmin()] = 1
    return sizes


def divide_images(
    pixels: np.ndarray,
    sources: Sequence[str],
    shares: Sequence[float],
    seed: int,
    fixed_parts: np.ndarray | None = None,
) -> np.ndarray:
    """Divide images into parts so that each class is spread over them as the images are.

    Sources are dealt out one after the other, the largest first, then those with the rarest class, else in random
    order. A beam search deals them: it keeps the divisions with the smallest sums of chi-square of the images that
    hold each class, a tenth of the same of its pixels, and 1 for each part without it. Iterative stratification
    (Sechidis et al., 2011) keeps one division, and leaves several times larger differences.

    Args:
        pixels: of each class in each image, int (images, classes).
        sources: of each image; images of one source stay together. There must be as many sources as parts.
        shares: of the parts. Their sizes are those of `sizes_of` if every image has its own source, else near them.
        seed: the same seed gives the same parts.
        fixed_parts: the part in which an image stays, with all of its source, or -1; None: no image is in any.

    Returns:
        The part of each image, int64 (images,); every part has some.
    """
    _, source, image_counts = np.unique(sources, return_inverse=True, return_counts=True)
    parts = np.full(len(image_counts), -1)  # of each source
    if fixed_parts is not None:
        np.maximum.at(parts, source, fixed_parts)

    holding = np.maximum((pixels > 0).sum(axis=0), 1)  # how many images hold each class
    rows = np.zeros((len(parts), 2 * len(holding)))
    np.add.at(rows, source, _weighted_columns(pixels, holding))
    rarity = np.full(len(parts), np.inf)
    np.minimum.at(rarity, source, np.where(pixels > 0, holding, np.inf).min(axis=1))
    order = np.random.default_rng(seed).permutation(np.flatnonzero(parts < 0))
    order = order[np.lexsort((rarity[order], -image_counts[order]))]
    parts[order] = _deal_sources(rows, image_counts, order, parts, sizes_of(len(pixels), shares))
    return parts[source]


def _weighted_columns(pixels: np.ndarray, holding: np.ndarray) -> np.ndarray:
    """Whether images hold each class, and their shares of its pixels, (images, 2 * classes).

    They are scaled so that the squared errors of all columns add up to chi-square times a share.
    """
    columns = np.hstack([pixels > 0, pixels / np.maximum(pixels.sum(axis=0), 1) * holding])
    return columns * np.sqrt(np.hstack([1 / holding, _PIXEL_WEIGHT / holding]))


def _deal_sources(
    rows: np.ndarray, image_counts: np.ndarray, order: np.ndarray, parts: np.ndarray, sizes: np.ndarray
) -> list[int]:
    """The part of each source in `order`, by beam search; `parts` of the other sources, else -1, stay.

    `rows`, `image_counts`: of each source, see `divide_images`. `sizes`: how many images each part should get.
    """
    shares = sizes / sizes.sum()
    members = [parts == part for part in range(len(sizes))]
    # Of each division that is kept: the sums of its parts' rows, (divisions, parts, columns), and the images that its
    # parts still need, (divisions, parts).
    sums = np.stack([rows[member].sum(axis=0) for member in members])[None]
    room = sizes[None] - [[image_counts[member].sum() for member in members]]
    total = sums.sum(axis=(0, 1))  # of the sources that have been dealt
    width = int(np.clip(_DIVISIONS_TRIED // max(len(order), 1), *_WIDTHS))
    steps = []  # of each source: which previous division each division continues, and the source's part in it
    for number, source in enumerate(order):
        total = total + rows[source]
        fair_sums = shares[:, None] * total
        costs_before = _costs_of_parts(sums, fair_sums, shares, room)
        sums_after, room_after = sums + rows[source], room - image_counts[source]  # of a part that gets the source
        costs_after = _costs_of_parts(sums_after, fair_sums, shares, room_after)
        costs = costs_before.sum(axis=1, keepdims=True) - costs_before + costs_after
        is_empty = room == sizes
        must_fill = is_empty.sum(axis=1, keepdims=True) >= len(order) - number
        costs[must_fill & ~is_empty] = np.inf
        # Divisions of equal cost are mostly the same one with parts exchanged: one of them stays.
        lowest, choices = np.unique(costs.round(9), return_index=True)
        previous, part = np.divmod(choices[np.isfinite(lowest)][:width], len(sizes))
        steps.append((previous, part))
        sums = sums[previous]
        room = room[previous]
        chosen = np.arange(len(part)), part
        sums[chosen] += rows[source]
        room[chosen] -= image_counts[source]

    return _parts_of_best(steps)


def _costs_of_parts(sums: np.ndarray, fair_sums: np.ndarray, shares: np.ndarray, room: np.ndarray) -> np.ndarray:
    """How far each part of each division is from its share, (divisions, parts), see `divide_images`.

    `sums`, `room`: see `_deal_sources`. `fair_sums`: what the sums were if all parts were alike, (parts, columns).
    """
    is_absent = sums[..., : sums.shape[-1] // 2] < 1e-6
    chi_square = ((sums - fair_sums) ** 2).sum(axis=-1) / shares
    return chi_square + is_absent.sum(axis=-1) + _SIZE_WEIGHT * np.minimum(room, 0) ** 2


def _parts_of_best(steps: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[int]:
    """The part of each source in the first of the last divisions, which is the best. `steps`: see `_deal_sources`."""
    division = 0
    parts = []
    for previous, part in reversed(steps):
        parts.append(int(part[division]))
        division = previous[division]
    return parts[::-1]


def source_prefixes(names: Sequence[str], parts: int) -> tuple[str, Counter[str]]:
    """The shortest beginning of the names before one of their numbers that may be the images' source.

    That is, if every name has this number, and there are enough sources: 2 per part to half as many as names. A shorter
    beginning with at least one per part counts before them: tiles of a scene have its name first.

    Returns a regular expression whose first group finds it, and the number of names that begin so; "" and none if no
    beginning may be a source.
    """
    candidates = []
    beginning = r"\D*"
    for _ in range(min(len(re.findall(r"\d+", name)) for name in names)):
        pattern = rf"^({beginning})\d"
        beginning += r"\d+\D+"
        matches = filter(None, (re.search(pattern, name) for name in names))
        counts = Counter(match[1] for match in matches)
        if parts <= len(counts) <= len(names) / 2:
            candidates.append((pattern, counts))
    are_enough = any(len(counts) >= 2 * parts for _, counts in candidates)
    return candidates[0] if are_enough else ("", Counter())
