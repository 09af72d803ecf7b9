"""A page of predictions in one HTML file: every image with its overlay and legend, or its likeliest classes."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template

import numpy as np
from PIL import Image

from datasets.file_list import printable

LARGEST = (800, 800)  # pixels of an image on the page
TEMPLATE = Path(__file__).with_suffix(".html")  # of the page around its sections
_SLIDER = """<label>Opacity of the classes <input type="range" min="0" max="1" step="0.01" value="0.6"
 oninput="document.documentElement.style.setProperty('--opacity', this.value)"></label>"""


class Page:
    """Collects predictions for one page.

    `palette`: uint8 (classes, 3) of a segmentation; None: whole images are classified, and their `shown`
    likeliest classes appear.
    """

    def __init__(self, title: str, classes: Sequence[str], palette: np.ndarray | None, shown: int):
        self.title = title
        self.classes = classes
        self.palette = palette
        self.shown = shown if palette is None else len(classes)
        self.sections: list[str] = []
        self.total = np.zeros(len(classes))

    def add(self, name: str, image: np.ndarray, shares: np.ndarray, ids: np.ndarray | None = None) -> None:
        """An image, uint8 (H, W, 3) RGB, the share or probability of each class, and a segmentation's train ids."""
        small = Image.fromarray(image)
        small.thumbnail(LARGEST, Image.Resampling.BOX)
        pictures = f'<img class="image" alt="" src="{encoded(small, "JPEG")}">'
        if ids is not None and self.palette is not None:
            mask = Image.fromarray(ids)
            mask.putpalette(self.palette.tobytes())
            mask.thumbnail(LARGEST, Image.Resampling.NEAREST)
            source = encoded(mask, "PNG")
            pictures += f'<div class="over"><img class="copy" alt=""><img class="mask" alt="" src="{source}"></div>'
        self.total += shares
        layout = "row whole" if ids is None else "row"
        table = self.table(shares, self.shown)
        self.sections.append(
            f'<section><h2>{escape(printable(name))}</h2><div class="{layout}">{pictures}{table}</div></section>\n'
        )

    def table(self, shares: np.ndarray, most: int) -> str:
        """The classes with the largest shares, as bars in their colours."""
        order = [number for number in np.argsort(-shares, kind="stable")[:most] if shares[number] > 0]
        return f"<table>{''.join(self._line(number, shares[number]) for number in order)}</table>"

    def _line(self, number: int, share: float) -> str:
        colour = "GrayText" if self.palette is None else "rgb({},{},{})".format(*self.palette[number])
        bar = f'<div style="width:{100 * share:.2f}%;background:{colour}"></div>'
        return (
            f'<tr><td>{escape(printable(self.classes[number]))}</td><td class="bar">{bar}</td><td>{share:.1%}</td></tr>'
        )

    def html(self) -> Iterable[str]:
        """The parts of the page."""
        count = len(self.sections)
        segments = self.palette is not None
        head, foot = TEMPLATE.read_text("utf-8").split("$sections")
        yield Template(head).substitute(title=escape(self.title), slider=_SLIDER if segments else "")
        heading = "Share of each class" if segments else "Mean probability of each class"
        overall = self.table(self.total / max(count, 1), len(self.classes))
        yield f"<section><details open><summary>{heading} in {count} images</summary>{overall}</details></section>\n"
        yield from self.sections
        yield foot


def encoded(image: Image.Image, format: str) -> str:
    """The image as a data URL."""
    content = BytesIO()
    image.save(content, format, quality=85)
    return f"data:image/{format.lower()};base64,{b64encode(content.getvalue()).decode()}"
