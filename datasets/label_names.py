"""Where labels lie beside images, and what lies there instead."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from datasets.file_list import composed, files_in, list_files, readable
from datasets.layout import PHOTOGRAPHS

_DRAWN = (
    "labels are PNGs with a class id per pixel: export masks from the labelling tool, or draw the outlines, as with "
    "PIL.ImageDraw.Draw(label).polygon(points, fill=id) on label = PIL.Image.new('L', size)"
)
_MADE_OF = {  # what people have instead of labels: suffixes, and what to do
    "polygons (labelme, COCO, …)": ((".json", ".geojson", ".jsonl"), _DRAWN),
    "polygons or boxes (YOLO, …)": ((".txt", ".csv"), _DRAWN),
    "polygons or boxes (CVAT, Pascal VOC, …)": ((".xml", ".svg"), _DRAWN),
    "arrays": (
        (".npy", ".npz", ".mat", ".h5", ".pt", ".pkl"),
        "save each as a PNG, as with PIL.Image.fromarray(array.astype('uint8')).save('NAME.png')",
    ),
}


class LabelNames(NamedTuple):
    """Where labels lie: in `folder`, beside images. A label's name is its image's name plus `suffix`.

    `keys`: prefix of the options label_folder and label_suffix in messages.
    """

    folder: str = "labels"
    suffix: str = ""
    keys: str = ""

    def check(self) -> None:
        """ValueError if the folder is not beside images, or if nothing tells labels from images."""
        if Path(self.folder).name != self.folder or self.folder in ("", ".."):
            raise ValueError(f"{self.keys}label_folder={self.folder}: expected the name of a folder, such as masks")
        if self.folder == "images" and not self.suffix:
            raise ValueError(
                f"{self.keys}label_folder=images needs {self.keys}label_suffix, such as _mask, by which labels and "
                f"images differ"
            )

    def images(self, found: dict[str, Path]) -> dict[str, Path]:
        """The images among the files of their folder, which may hold the labels too."""
        if self.folder != "images":
            return found
        return {name: path for name, path in found.items() if not name.endswith(self.suffix)}

    def labels(self, above: Path) -> dict[str, Path]:
        """{name of the image: label file}; empty if the folder is missing."""
        folder, suffixes = above / self.folder, [f"{self.suffix}{kind}" for kind in PHOTOGRAPHS]
        return list_files(folder, suffixes, deep=True) if folder.is_dir() else {}

    def among(self, files: Sequence[Path]) -> set[Path]:
        """The files that are labels: in a folder for labels beside the images, under the name of one of these."""
        names = {path: composed(str(path.with_suffix(""))) for path in files}
        known, found = {*names.values()}, set[Path]()
        for path, own in names.items():
            for above in path.parents:
                if above.name in ("labels", "masks", self.folder):
                    image = composed(str((above.parent / "images" / path.relative_to(above)).with_suffix("")))
                    found |= {path} if {image, image.removesuffix(self.suffix)} & known - {own} else set()
        return found

    def found(self, above: Path, images: Mapping[str, Path]) -> str | None:
        """Advice if a quarter or more of the images have labels in another folder or with another suffix, or if other
        files are there in place of labels."""
        wanted, seen = [*images][:50], Counter[tuple[str, str]]()
        for folder in filter(Path.is_dir, above.iterdir() if above.is_dir() else ()):
            with suppress(ValueError):  # two files of one name
                names = [*list_files(folder, PHOTOGRAPHS, deep=True)]
                for image in wanted:
                    same = takewhile(methodcaller("startswith", image), islice(names, bisect_left(names, image), None))
                    seen.update((folder.name, name.removeprefix(image)) for name in same)
        del seen["images", ""]
        if not seen or 4 * max(seen.values()) < len(wanted):
            return self._instead(above, images)
        place, suffix = max(sorted(seen), key=seen.__getitem__)
        given = {"label_folder": (place, self.folder), "label_suffix": (suffix, self.suffix)}
        options = " ".join(f"{self.keys}{key}={new}" for key, (new, old) in given.items() if new != old)
        return (
            f"{above / place} holds labels such as {readable(wanted[0] + suffix)}: give {options}" if options else None
        )

    def _instead(self, above: Path, images: Mapping[str, Path]) -> str | None:
        """What lies in the place of the images' labels, perhaps one file for all, and how to make labels of it."""
        taken = {*images.values()}
        is_alone, folders = not self.labels(above), (path for path in above.iterdir() if path.is_dir())
        for folder in sorted(folders, key=lambda path: (path.name != self.folder, path.name)):
            files = sorted({name for name, _ in files_in(folder) if folder / name not in taken})
            own = [name for name in files if os.path.splitext(name)[0].removesuffix(self.suffix) in images]
            for what, (ends, cure) in _MADE_OF.items():
                named = [name for name in own if name.lower().endswith(ends)]
                if not named and is_alone:
                    named = [name for name in files if name.lower().endswith(".json") and ".json" in ends]
                if named:
                    return f"{folder} holds {len(named)} files of {what}, such as {readable(named[0])}: {cure}"
        return None
