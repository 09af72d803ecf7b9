"""The page of predictions: complete in itself, with the right pixels, shares and names."""

import re
from base64 import b64decode
from io import BytesIO

import numpy as np
from PIL import Image

from scripts.reports.predictions import LARGEST, Page

PALETTE = np.array([[255, 0, 0], [0, 128, 0], [0, 0, 255]], np.uint8)


def pictures(html: str) -> list[Image.Image]:
    return [Image.open(BytesIO(b64decode(data))) for data in re.findall(r"data:image/\w+;base64,([^\"]+)", html)]


def test_a_segmented_image_has_its_classes_colours_and_shares():
    page = Page("A & B", ["road <1>", "sky", "car"], PALETTE, shown=5)
    ids = np.zeros((40, 50), np.uint8)
    ids[:10] = 1
    large = np.full((10, 4 * LARGEST[0]), 2, np.uint8)
    page.add('a"<b>.jpg', np.full((40, 50, 3), 77, np.uint8), np.array([0.75, 0.25, 0]), ids)
    page.add("large.png", np.dstack(3 * [0 * large]), np.array([0, 0, 1]), large)
    html = "".join(page.html())
    assert not re.search(r"(src|href)=\"(?!data:)", html) and "http" not in html and "@import" not in html
    image, mask, shrunk, _ = pictures(html)
    assert np.abs(np.asarray(image).astype(int) - 77).max() <= 1
    assert np.array_equal(np.asarray(mask.convert("RGB")), PALETTE[ids])
    assert shrunk.width == LARGEST[0]
    overall, first, second = html.split("<section>")[1:]
    lines = re.compile(r"<td>([^<]+)</td>.*?background:(rgb\S+?)\".*?<td>([\d.]+%)</td>")
    road, sky = ("road &lt;1&gt;", "rgb(255,0,0)"), ("sky", "rgb(0,128,0)")
    assert lines.findall(first) == [(*road, "75.0%"), (*sky, "25.0%")]
    assert lines.findall(overall) == [("car", "rgb(0,0,255)", "50.0%"), (*road, "37.5%"), (*sky, "12.5%")]
    assert "a&quot;&lt;b&gt;.jpg" in first and "<h1>A &amp; B</h1>" in html and 'type="range"' in html


def test_a_classified_image_has_bars_of_its_likeliest_classes():
    page = Page("three", ["a", "b", "c"], None, shown=2)
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    page.add(name, np.zeros((8, 8, 3), np.uint8), np.array([0.125, 0.25, 0.625]))
    html = "".join(page.html())
    html.encode()
    section = html.split("<section>")[2]
    assert re.findall(r"<tr><td>(.)</td>.*?width:([\d.]+)%", section) == [("c", "62.50"), ("b", "25.00")]
    assert "caf\\udce9.jpg" in section and len(pictures(html)) == 1 and 'type="range"' not in html
