"""A page of predictions in one HTML file: every image with its overlay and legend, or its likeliest classes."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO

import numpy as np
from PIL import Image

from datasets.file_list import printable

LARGEST = (800, 800)  # pixels of an image on the page
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ --opacity: 0.6; color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }}
body {{ margin: 0 auto; max-width: 1500px; padding: 0 1rem 2rem }}
header {{ position: sticky; top: 0; z-index: 1; padding: .6rem 0; background: Canvas; border-bottom: 1px solid }}
h1 {{ font-size: 1.2rem; margin: 0 }} h2 {{ font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere }}
section {{ margin-top: 1.5rem }}
.row {{ display: grid; grid-template-columns: 1fr 1fr minmax(14rem, .5fr); gap: 1rem; align-items: start }}
.row.whole {{ grid-template-columns: minmax(0, 24rem) minmax(14rem, 30rem) }}
.over {{ position: relative }} img {{ display: block; width: 100% }}
.mask {{ position: absolute; inset: 0; height: 100%; opacity: var(--opacity); image-rendering: pixelated }}
table {{ border-collapse: collapse; width: 100% }} td {{ padding: .1rem .4rem; overflow-wrap: anywhere }}
td:last-child {{ text-align: right; white-space: nowrap }}
td.bar {{ width: 40%; min-width: 4rem }} td.bar div {{ height: .8rem; border: 1px solid GrayText; min-width: 1px }}
@media (max-width: 700px) {{ .row, .row.whole {{ grid-template-columns: 1fr }} }}
</style>
<header><h1>{title}</h1>{slider}</header>
"""
_SLIDER = """<label>Opacity of the classes <input type="range" min="0" max="1" step="0.01" value="0.6"
 oninput="document.documentElement.style.setProperty('--opacity', this.value)"></label>"""
_FOOT = """<script>for (const copy of document.querySelectorAll("img.copy"))
 copy.src = copy.closest(".row").querySelector("img.image").src</script></html>
"""


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
        yield _HEAD.format(title=escape(self.title), slider=_SLIDER if segments else "")
        heading = "Share of each class" if segments else "Mean probability of each class"
        overall = self.table(self.total / max(count, 1), len(self.classes))
        yield f"<section><details open><summary>{heading} in {count} images</summary>{overall}</details></section>\n"
        yield from self.sections
        yield _FOOT


def encoded(image: Image.Image, format: str) -> str:
    """The image as a data URL."""
    content = BytesIO()
    image.save(content, format, quality=85)
    return f"data:image/{format.lower()};base64,{b64encode(content.getvalue()).decode()}"
