"""Where labels lie beside images, and what lies there instead."""

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, permutations, takewhile
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from datasets.file_list import composed, files_in, list_files, readable
from datasets.layout import PHOTOGRAPHS

_DRAWN = (
    "labels are PNGs with a class id per pixel: export masks from the labelling tool, or draw the outlines, as with "
    "PIL.ImageDraw.Draw(label).polygon(points, fill=id) on label = PIL.Image.new('L', size) (docs/data.md, Labels of "
    "other kinds, has programs for COCO and labelme)"
)
_OF_LABELS = re.compile("label|mask|ann|gt|seg|semantic", re.IGNORECASE)  # in a folder's name
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
    """Where labels lie: in `folder`, beside `image_folder`. A label's name is its image's name plus `suffix`.

    `keys`: prefix of the options label_folder, label_suffix and image_folder in messages.
    """

    folder: str = "labels"
    suffix: str = ""
    keys: str = ""
    image_folder: str = "images"

    def check(self) -> None:
        """ValueError if the folder is not beside images, or if nothing tells labels from images."""
        for key, name, such in (("label", self.folder, "masks"), ("image", self.image_folder, "images")):
            if Path(name).name != name or name in ("", ".."):
                raise ValueError(f"{self.keys}{key}_folder={name}: expected the name of a folder, such as {such}")
        if self.folder == self.image_folder and not self.suffix:
            raise ValueError(
                f"{self.keys}label_folder={self.folder} needs {self.keys}label_suffix, such as _mask, by which "
                f"labels and images differ"
            )

    def images(self, found: dict[str, Path]) -> dict[str, Path]:
        """The images among the files of their folder, which may hold the labels too."""
        if self.folder != self.image_folder:
            return found
        return {name: path for name, path in found.items() if not name.endswith(self.suffix)}

    def labels(self, folder: Path) -> dict[str, Path]:
        """{name of the image: label file} in a folder; empty if it is missing."""
        suffixes = [f"{self.suffix}{kind}" for kind in PHOTOGRAPHS]
        return list_files(folder, suffixes, deep=True) if folder.is_dir() else {}

    def among(self, files: Sequence[Path]) -> set[Path]:
        """The files that are labels: in a folder for labels beside the images, under the name of one of these."""
        names = {path: composed(str(path.with_suffix(""))) for path in files}
        known, found = {*names.values()}, set[Path]()
        for path, own in names.items():
            for above in path.parents:
                if above.name in ("labels", "masks", self.folder):
                    image = composed(str((above.parent / self.image_folder / path.relative_to(above)).with_suffix("")))
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
        del seen[self.image_folder, ""]
        if not seen or 4 * max(seen.values()) < len(wanted):
            return self._instead(above, images)
        place, suffix = max(sorted(seen), key=seen.__getitem__)
        given = {"label_folder": (place, self.folder), "label_suffix": (suffix, self.suffix)}
        options = " ".join(f"{self.keys}{key}={new}" for key, (new, old) in given.items() if new != old)
        return (
            f"{above / place} holds labels such as {readable(wanted[0] + suffix)}: give {options}" if options else None
        )

    def twins(self, above: Path) -> str | None:
        """Advice if two folders, here or in one below, hold images and their labels, such as img_dir and ann_dir."""
        for place in (above, *sorted(filter(Path.is_dir, above.iterdir()))):
            names = {
                each.name: [*list_files(each, PHOTOGRAPHS, deep=True)] for each in place.iterdir() if each.is_dir()
            }
            for images, labels in permutations(sorted(names), 2):
                wanted, known = names[images][:50], names[labels]
                nearest = [(image, *known[bisect_left(known, image) :][:1]) for image in wanted]
                same = sum(near[-1].startswith(image) for image, *near in nearest if near)
                if same * 4 >= max(1, len(wanted)) and _OF_LABELS.search(labels) and not _OF_LABELS.search(images):
                    given = {"image_folder": (images, self.image_folder), "label_folder": (labels, self.folder)}
                    return "give " + " ".join(
                        f"{self.keys}{key}={new}" for key, (new, old) in given.items() if new != old
                    )
        return None

    def _instead(self, above: Path, images: Mapping[str, Path]) -> str | None:
        """What lies in the place of the images' labels, perhaps one file for all, and how to make labels of it."""
        taken = {*images.values()}
        is_alone, folders = not self.labels(above / self.folder), (path for path in above.iterdir() if path.is_dir())
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
