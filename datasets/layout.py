"""Finds a dataset's files on disk. Errors name what is missing, the expected layout and the fix."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.file_list import files_in, list_files, readable, why_unfit
from datasets.segmentation import Files

# Suffixes of the user's own images. Reading refuses HEIF by name; a file with another suffix is not an image.
PHOTOGRAPHS = tuple(
    ".png .jpg .jpeg .bmp .jfif .tif .tiff .webp .avif .gif .heic .heif .jpe .mpo .apng .ppm .pgm .pbm .pnm .jp2 .j2k "
    ".jpf .jpx .jpc .j2c .tga .vda .icb .vst .qoi".split()
)


@dataclass(frozen=True)
class Layout:
    """The file layout of dataset `name`. Errors print `tree` (the expected folders) and `source` (how to get them)."""

    name: str
    splits: Sequence[str]
    tree: str
    source: str

    def check(self, root: str | os.PathLike | None, split: str) -> Path:
        """Return the root folder as a Path. ValueError if it does not exist or the split is unknown."""
        if split not in self.splits:
            raise ValueError(f"split {split!r} is unknown to {self.name}; expected one of {', '.join(self.splits)}")
        return self.top(root)

    def top(self, root: str | os.PathLike | None) -> Path:
        """Return the root folder as a Path. ValueError if it does not exist."""
        if root is None or str(root) == "":
            raise self.error(f"no folder is given; {self.name} needs the folder that holds its files")
        root = Path(os.path.expanduser(root))
        if not root.is_dir():
            start = "" if root.is_absolute() else f" below {Path.cwd()}, from which a relative path counts"
            problem = "a link that leads nowhere" if root.is_symlink() else "not an existing folder"
            raise self.error(f"{root} is {problem}{start}", fix="give the folder at the top of this layout")
        return root

    def error(self, problem: str, root: Path | None = None, fix: str | None = None) -> ValueError:
        """A ValueError that states the problem, the contents of `root`, the expected tree and the `fix`."""
        contents = ""
        if root is not None:
            names = sorted(readable(path.name) + ("/" if path.is_dir() else "") for path in root.iterdir())
            ending = f", … ({len(names)} entries)" if len(names) > 8 else ""
            contents = f"\nFound in {root}: {', '.join(names[:8]) or 'nothing'}{ending}"
        tree = "\n".join(f"    {line}" for line in self.tree.strip("\n").splitlines())
        fix = fix or f"{self.source} and give the folder at the top of this layout"
        return ValueError(f"{problem}.{contents}\nExpected layout of {self.name}:\n{tree}\nFix: {fix}.")

    def files(
        self,
        root: Path,
        folder: Path,
        suffixes: Sequence[str],
        images_of: str | None = None,
        deep: bool = False,
    ) -> dict[str, Path]:
        """`list_files` of a folder below `root`. ValueError if it is missing.

        `images_of`: the split whose images they are, if there must be some. `deep`: see `list_files`.
        """
        if not folder.is_dir():
            raise self.error(f"{self.name}: the folder {folder} is missing", root)
        paths = list_files(folder, suffixes, deep)
        if images_of is not None and not paths:
            raise self.no_images(root, folder, suffixes, images_of, deep)
        return paths

    def no_images(self, root: Path, folder: Path, suffixes: Sequence[str], split: str, deep: bool) -> ValueError:
        """An error that says which images of a split were looked for in a folder, and what is there."""
        ends = suffixes[0] if len(suffixes) == 1 else f"{{{','.join(suffixes)}}}"
        looked_for = f"{folder}/**/*{ends}" if deep else f"{folder}/*{ends}"
        kinds = Counter(os.path.splitext(name)[1] for name, _ in files_in(folder)).most_common(3)
        looked_for += f"; there are {' and '.join(f'{n} {kind}' for kind, n in kinds)}" if kinds else ""
        fix = None if kinds else f"put images into {folder}, or give another split"
        return self.error(f"{self.name}: no images in split {split!r}, looked for {looked_for}", root, fix)

    def check_list(
        self, file: Path, names: Sequence[str], images: Mapping[str, Path], root: Path, fix: str | None = None
    ) -> None:
        """ValueError unless all names on a list have an image in the split's folder. `fix`: see `error`."""
        missing = [name for name in names if name not in images]
        if missing:
            count = f"{len(missing)} of its {len(names)} images"
            problem = (
                f"{self.name}: {file}: {count}, such as {first_of(missing[:1])}, are missing from the split's folder"
            )
            candidates = [*images, *(f"{name}{path.suffix}" for name, path in images.items())]
            raise self.error("; ".join([problem, *in_other_capitals(missing, candidates)]), root, fix)

    def pair(
        self,
        images: Mapping[str, Path],
        labels: Mapping[str, Path] | None,
        root: Path,
        looked_for: str,
        fix: str | None = None,
    ) -> tuple[list[Files], tuple[str, ...]]:
        """Pair images with labels by name. Also returns remarks on labels without an image, which are left out.

        `labels`: None of a split without any. ValueError counts and names the images without a label. `fix`: see
        `error`.
        """
        if labels is None:
            return [Files(name, image) for name, image in images.items()], ()
        missing = [name for name in images if name not in labels]
        if missing:
            count = f"{len(missing)} of {len(images)} images"
            problem = f"{self.name}: {count} have no label: {first_of(missing)}; looked for {looked_for}"
            raise self.error("; ".join([problem, *in_other_capitals(missing, labels)]), root, fix=fix)
        files = [Files(name, image, labels[name]) for name, image in images.items()]
        return files, remarks_on([path for name, path in labels.items() if name not in images])

    def pair_listed(
        self,
        names: Sequence[str],
        images: Mapping[str, Path],
        labels: Mapping[str, Path] | None,
        root: Path,
        looked_for: str,
        fix: str | None = None,
    ) -> list[Files]:
        """The images on a list with their labels, sorted; an image that is there several times counts as often.

        All `names` must be in `images`, see `check_list`. Other arguments: see `pair`; labels without an image are left
        out without a remark.
        """
        files, _ = self.pair({name: images[name] for name in names}, labels, root, looked_for, fix)
        by_name = {entry.name: entry for entry in files}
        return [by_name[name] for name in sorted(names)]


def read_json(file: Path) -> Any:
    """The content of a JSON file. OSError or ValueError if it cannot be read."""
    why = why_unfit(file)
    if why is not None:
        raise ValueError(f"it {why}")
    return json.loads(file.read_text("utf-8-sig"))


def read_list(file: Path, line_content: str) -> list[str]:
    """The lines of a text file that are not blank, as they are. ValueError if there are none, or it is not text.

    `line_content`: what a line should hold, for messages.
    """
    try:
        why = why_unfit(file)
        if why is not None:
            raise ValueError(f"it {why}")
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); expected text in UTF-8, {line_content} per line") from None
    if not any(lines):
        raise ValueError(f"{file}: the list is empty; expected {line_content} per line")
    return lines


def first_of(names: Sequence[str]) -> str:
    """The first five names, for messages; in quotes where a blank is at an end."""
    shown = (readable(name) if name == name.strip() else repr(name) for name in names[:5])
    return ", ".join(shown) + (", …" if len(names) > 5 else "")


def in_other_capitals(missing: Iterable[str], candidates: Iterable[str]) -> list[str]:
    """A sentence on missing names that are among the candidates in other capitals."""
    folded = {name.casefold(): name for name in candidates}
    pairs = [(name, folded[name.casefold()]) for name in missing if name.casefold() in folded]
    if not pairs:
        return []
    example = " and ".join(map(readable, pairs[0]))
    return [f"{len(pairs)} differ only in capitals, such as {example}: rename one of each pair"]


def remarks_on(
    unpaired_labels: Sequence[Path] = (), other_files: Sequence[str] = (), unlisted: Sequence[str] = ()
) -> tuple[str, ...]:
    """Sentences on labels without an image, and on other files that are left out.

    `unlisted`: the names of images that have labels, and are on no list.
    """
    kinds: list[tuple[str, Sequence[str | Path]]] = [
        ("labels without an image", unpaired_labels),
        ("files that are not read as images", other_files),
    ]
    remarks = [
        f"left out {len(paths)} {kind}, such as {first_of([min(map(str, paths))])}" for kind, paths in kinds if paths
    ]
    return (*remarks, *about_unlisted(unlisted))


def about_unlisted(names: Sequence[str]) -> list[str]:
    """A sentence on images that have labels, and are on no list."""
    if not names:
        return []
    problem = f"{len(names)} images with labels are on no list, so nothing uses them, such as {first_of(names[:1])}"
    cure = "scripts.make_classes add=true deals them out, with the split or folds and the group that wrote the lists"
    return [f"{problem}: {cure}"]
