"""A picture of a confusion matrix."""

import re
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
    """Names as pictures can show them: numbers in place of those whose characters no installed font has."""
    shown = [str(number) if _fonts_for(name) is None else printable(name) for number, name in enumerate(names)]
    if unknown := [name for name in names if _fonts_for(name) is None]:
        logger.info(
            f"pictures show {len(unknown)} classes by number, as no installed font has the characters of {unknown[0]}; "
            f"Noto Sans CJK has Chinese, Japanese and Korean"
        )
    return shown


def with_literal_texts(figure: Figure) -> Figure:
    """Show the figure's texts literally: names of classes and images may contain a $, or bytes that are not UTF-8.

    Other alphabets than matplotlib's font has are shown in installed fonts that have them, otherwise as "?".
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        words = printable(text.get_text())
        fonts = _fonts_for(words)
        if fonts is None:
            words, fonts = re.sub(r"[^\x00-\xff]", "?", words), ()
        text.set_text(words)
        if fonts:
            text.set_fontfamily([*text.get_fontfamily(), *fonts])
    return figure


@cache
def _fonts_for(text: str) -> tuple[str, ...] | None:
    """Installed fonts with the characters that matplotlib's own lacks; None if there are none."""
    missing, fonts = {*filter(str.isprintable, text)} - _characters(findfont(FontProperties())), []
    for font in fontManager.ttflist if missing else ():
        if "Last Resort" not in font.name and (found := missing & _characters(font.fname)):  # it draws boxes
            fonts.append(font.name)
            missing -= found
    return None if missing else tuple(fonts)


@cache
def _characters(font: str) -> set[str]:
    return {*map(chr, FT2Font(font).get_charmap())}
