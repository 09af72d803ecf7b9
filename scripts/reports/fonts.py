"""Texts in figures as they are: names may contain a $, other scripts, or bytes that are not UTF-8."""

from collections.abc import Sequence
from functools import cache

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from engine.process.console import logger, printable


def shown_names(names: Sequence[str]) -> list[str]:
    """Names as pictures can show them: numbers in place of those with characters that no installed font has."""
    unknown = [name for name in names if (lacking := _lacking(name)) and _family_with(lacking) is None]
    if unknown:
        logger.info(f"pictures show {len(unknown)} classes by number: no font has the characters of {unknown[0]}")
    return [str(number) if name in unknown else printable(name) for number, name in enumerate(names)]


def with_literal_texts(figure: Figure) -> Figure:
    """Show the figure's texts literally.

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
