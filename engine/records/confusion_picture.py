"""A picture of a confusion matrix."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from engine.process.console import logger, printable


def confusion_picture(confusion: np.ndarray, classes: tuple[str, ...], title: str) -> Figure:
    """Draw the percentage of each label that is predicted as each class. `confusion`: int (K, K), rows are labels.

    Rows without a count stay empty.
    """
    names = shown_names(classes)
    counts = confusion.sum(axis=1, keepdims=True)
    percent = np.where(counts > 0, 100 * confusion / np.maximum(counts, 1), np.nan)
    side = 3 + 0.24 * len(classes)  # inches: room for a number in every cell
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(percent, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100))  # keeps a few percent visible
    for row, column in zip(*np.nonzero(percent > 0.5), strict=True):
        colour = "white" if percent[row, column] > 40 else "black"
        text = f"{percent[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="predicted", ylabel="label")
    axes.set_title(title, loc="left")
    figure.colorbar(shown, ax=axes, shrink=0.5, aspect=30, pad=0.01)
    return with_literal_texts(figure)


def shown_names(names: Sequence[str]) -> list[str]:
    """Names as pictures can show them: numbers in place of those with characters that no installed font has."""
    unknown = [name for name in names if (lacking := _lacking(name)) and _family_with(lacking) is None]
    if unknown:
        logger.info(f"pictures show {len(unknown)} classes by number: no font has the characters of {unknown[0]}")
    return [str(number) if name in unknown else printable(name) for number, name in enumerate(names)]


def with_literal_texts(figure: Figure) -> Figure:
    """Show the figure's texts literally: names of classes and images may contain a $, or bytes that are not UTF-8.

    Texts get a second font if matplotlib's lacks characters. Characters that no installed font has are escaped.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        words = printable(text.get_text())
        if (lacking := _lacking(words)) and (family := _family_with(lacking)):
            text.set_fontfamily([*text.get_fontfamily(), family])
        elif lacking:
            escaped = {ord(each): each.encode("unicode_escape").decode() for each in lacking}
            words = words.translate(escaped)
        text.set_text(words)
    return figure


def _lacking(text: str) -> frozenset[str]:
    """The characters of a text that matplotlib's font lacks."""
    return frozenset(filter(str.isprintable, text)) - _characters(findfont(FontProperties()))


@cache
def _family_with(characters: frozenset[str]) -> str | None:
    """An installed font that has all characters."""
    fonts = (font for font in fontManager.ttflist if not font.name.startswith("Last Resort"))  # boxes for all
    return next((font.name for font in fonts if characters <= _characters(font.fname)), None)


@cache
def _characters(file: str) -> frozenset[str]:
    return frozenset(map(chr, FT2Font(file).get_charmap()))
