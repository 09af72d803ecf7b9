"""Where labels lie beside images, and what lies there instead."""

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from datasets.class_list import CLASSES
from datasets.file_list import composed, files_in, list_files, readable
from datasets.layout import PHOTOGRAPHS

_DRAWN = (
    "labels are PNGs with a class id per pixel: export masks from the labelling tool, or draw the outlines, as with "
    "PIL.ImageDraw.Draw(label).polygon(points, fill=id) on label = PIL.Image.new('L', size) (docs/data.md, Labels of "
    "other kinds, has programs for COCO and labelme)"
)
_OF_LABELS = re.compile("label|mask|ann|gt|seg|semantic|truth", re.IGNORECASE)  # in a folder's name
_MADE_OF = {  # what people have instead of labels: suffixes, and what to do
    "polygons (labelme, COCO, …)": ((".json", ".geojson", ".jsonl"), _DRAWN),
    "polygons or boxes (YOLO, …)": ((".txt", ".csv"), _DRAWN),
    "polygons or boxes (CVAT, Pascal VOC, …)": ((".xml", ".svg"), _DRAWN),
    "arrays": (
        (".npy", ".npz", ".mat", ".h5", ".pt", ".pkl"),
        "save each as a PNG, as with PIL.Image.fromarray(array.astype('uint8')).save('NAME.png')",
    ),
}
_WRITTEN = {CLASSES, "split.json", "folds.json", "written.json"}  # our commands write these beside images and pictures


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
        for key, name, example in (("label", self.folder, "masks"), ("image", self.image_folder, "images")):
            if Path(name).name != name or name in ("", ".."):
                raise ValueError(f"{self.keys}{key}_folder={name}: expected the name of a folder, such as {example}")
        if self.folder == self.image_folder and not self.suffix:
            raise ValueError(
                f"{self.keys}label_folder={self.folder} needs {self.keys}label_suffix, such as _mask, by which "
                f"labels and images differ"
            )

    def images(self, files: dict[str, Path]) -> dict[str, Path]:
        """The images among the files of their folder, which may hold the labels too."""
        if self.folder != self.image_folder:
            return files
        return {name: path for name, path in files.items() if not name.endswith(self.suffix)}

    def labels(self, folder: Path) -> dict[str, Path]:
        """{name of the image: label file} in a folder; empty if it is missing."""
        suffixes = [f"{self.suffix}{kind}" for kind in PHOTOGRAPHS]
        return list_files(folder, suffixes, deep=True) if folder.is_dir() else {}

    def labels_among(self, files: Sequence[Path]) -> set[Path]:
        """The files that are labels: in a folder for labels beside the images, under the name of one of these."""
        names = {path: composed(str(path.with_suffix(""))) for path in files}
        all_names = {*names.values()}
        labels = set[Path]()
        for path, name in names.items():
            for above in path.parents:
                if above.name not in ("labels", "masks", self.folder):
                    continue
                image_path = above.parent / self.image_folder / path.relative_to(above)
                image = composed(str(image_path.with_suffix("")))
                if ({image, image.removesuffix(self.suffix)} - {name}) & all_names:
                    labels.add(path)
        return labels

    def advice(self, above: Path, images: Mapping[str, Path]) -> str | None:
        """Advice on options by which many images have labels, or else on other files in place of labels.

        `above`: the folder above `images`. None if these options are given already, or nothing is there.
        """
        folders = [path for path in above.iterdir() if path.is_dir()]
        label_folder, suffix = self.usual_label_place(folders, images)
        if not label_folder:
            return self._advice_instead(above, images)
        options = self._as_options(folder=label_folder, suffix=suffix)
        example = readable(next(iter(images)) + suffix)
        return f"{above / label_folder} holds labels such as {example}: {options}" if options else None

    def twins_advice(self, above: Path) -> str | None:
        """Advice if two folders, here or up to two levels below, hold images and labels, such as img_dir and ann_dir.

        Or if all lie beside each other, or other files in place of labels. None if nothing of this is there.
        """
        for place in (above, *sorted(filter(Path.is_dir, (*above.glob("*"), *above.glob("*/*"))))):
            folders = sorted(filter(Path.is_dir, place.iterdir()))
            for folder in folders:
                advice = self._advice_on_images(folder, folders)
                if advice is not None:
                    return advice
        return self._advice_on_pairs(above) or self._advice_instead(above, {})

    def _advice_on_images(self, folder: Path, folders: Sequence[Path]) -> str | None:
        """Advice if a folder holds images, and another of `folders`, which lie beside it, their labels."""
        images = {} if _OF_LABELS.search(folder.name) else list_files(folder, PHOTOGRAPHS, deep=True)
        labels, suffix = self._replace(image_folder=folder.name).usual_label_place(folders, images)
        if labels != folder.name and _OF_LABELS.search(labels):
            return self._as_options(image_folder=folder.name, folder=labels, suffix=suffix)
        for label_folder in filter(lambda path: _OF_LABELS.search(path.name), folders):
            if _are_numbered(images, list_files(label_folder, PHOTOGRAPHS, deep=True)):
                options = self._as_options(image_folder=folder.name, folder=label_folder.name)
                then = f", and {options}" if options else ""
                return f"call the images in {folder} as their labels, without _0000{then}"
        return None

    def _advice_on_pairs(self, folder: Path) -> str | None:
        """Advice if labels lie beside their images in a folder, or in folders of it, as Roboflow writes them."""
        with suppress(ValueError):  # two files of one name
            images = list_files(folder, PHOTOGRAPHS, deep=True)
            _, suffix = self._replace(image_folder=folder.name).usual_label_place([folder], images)
            if _OF_LABELS.search(suffix):
                options = self._as_options(folder=self.image_folder, suffix=suffix)
                then = f", and {options}" if options else ""
                place = folder / self.image_folder
                return f"move the images and labels in {folder}, with their folders, to {place}{then}"
        return None

    def usual_label_place(self, folders: Sequence[Path], images: Mapping[str, Path]) -> tuple[str, str]:
        """The folder of most files that are called after the first images, and the suffix that follows their names.

        Of equal ones, one that is called like labels. Both are empty if fewer than a quarter of these images have such
        files.
        """
        wanted = [*images][:50]
        counts = Counter[tuple[str, str]]()
        for folder in folders:
            with suppress(ValueError):  # two files of one name
                names = [*list_files(folder, PHOTOGRAPHS, deep=True)]
                for image in wanted:
                    same = takewhile(methodcaller("startswith", image), islice(names, bisect_left(names, image), None))
                    counts.update((folder.name, name.removeprefix(image)) for name in same)
        del counts[self.image_folder, ""]
        if not counts or 4 * max(counts.values()) < len(wanted):
            return "", ""
        return max(sorted(counts), key=lambda place: (counts[place], bool(_OF_LABELS.search(place[0]))))

    def words(self, other: "LabelNames") -> str:
        """The options that give these names in place of another's, as they are typed."""
        names = (
            ("image_folder", self.image_folder, other.image_folder),
            ("label_folder", self.folder, other.folder),
            ("label_suffix", self.suffix, other.suffix),
        )
        return " ".join(f"{self.keys}{key}={name}" for key, name, old_name in names if name != old_name)

    def _as_options(self, **names: str) -> str:
        """Advice to give the options by which names differ from these; "" if none differs."""
        words = self._replace(**names).words(self)
        return words and f"give {words}"

    def _advice_instead(self, above: Path, images: Mapping[str, Path]) -> str | None:
        """What lies in the place of the images' labels, perhaps one file for all, and how to make labels of it."""
        image_paths = {*images.values()}
        has_no_labels = not self.labels(above / self.folder)
        folders = sorted(filter(Path.is_dir, above.iterdir()), key=lambda path: (path.name != self.folder, path.name))
        for folder in (*folders, above):
            other_names = {name for name, _ in files_in(folder) if folder / name not in image_paths}
            files = sorted(name for name in other_names if os.path.basename(name) not in _WRITTEN)
            of_images = [name for name in files if os.path.splitext(name)[0].removesuffix(self.suffix) in images]
            for kind, (ends, cure) in _MADE_OF.items():
                names = [name for name in of_images if name.lower().endswith(ends)]
                if not names and has_no_labels:
                    names = [name for name in files if name.lower().endswith(".json") and ".json" in ends]
                if names:
                    return f"{folder} holds {len(names)} files of {kind}, such as {readable(names[0])}: {cure}"
        return None


def _are_numbered(images: Mapping[str, Path], labels: Mapping[str, Path]) -> bool:
    """Whether images are named as nnU-Net's are: NAME_0000, the first channel, of the label NAME."""
    return any(name.endswith("_0000") and name.removesuffix("_0000") in labels for name in images)
