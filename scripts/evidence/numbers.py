"""Find the numbers of sentences on pages, and write those that the records have.

`scripts.evidence.sentences` lists the sentences, and `python -m scripts.evidence.documents` writes their numbers. A
sentence stands once on its page, with any white space.
"""

import difflib
import re
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

NUMBER = r"([+-]?[\d,.]*\d)"
MEASURED = re.compile(r"\d+\.\d+|\d[\d,]*(?=[ -]?(?:%|ms\b|[GM]iB\b|points?\b))")  # needs a record, or is quoted
NO_PROSE = re.compile(r"(?s)<!-- (\w+) start -->.*?<!-- \1 end -->|```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+")


class Sentence(NamedTuple):
    """Words of a page with a format such as {:.2f} for each number, and the function that gives the numbers."""

    text: str
    values: Callable[[], Sequence[float]] = lambda: ()

    def found(self, page: str) -> re.Match:
        """Where it stands on a page; a group is a number. ValueError: it does not stand there exactly once."""
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part, *_ in string.Formatter().parse(self.text)]
        places = list(re.finditer(NUMBER.join(words if self.text[-1] != "}" else [*words, ""]), page))
        if len(places) != 1:
            lines = " ".join(page.split()).split(". ")
            nearest = difflib.get_close_matches(self.text, lines, n=1, cutoff=0.3)
            raise ValueError(f"{self.text!r} occurs {len(places)} times, expected once; nearest: {nearest}")
        return places[0]

    def numbers(self) -> list[str]:
        """Its numbers as text. ValueError: they are not as many as the formats."""
        formats = [form for _, _, form, _ in string.Formatter().parse(self.text) if form is not None]
        values = self.values()
        if len(values) != len(formats):
            raise ValueError(f"{self.text!r}: {len(values)} values for {len(formats)} formats")
        return [format(value, form) for value, form in zip(values, formats, strict=True)]


def written(sentences: Sequence[Sentence], page: str) -> str:
    """The text of a page with the numbers that the records have. ValueError: a sentence or a number is not there."""
    changes = []
    for sentence in sentences:
        found = sentence.found(page)
        changes += [(*found.span(i), number) for i, number in enumerate(sentence.numbers(), 1)]
    for start, end, number in sorted(changes, reverse=True):
        page = page[:start] + number + page[end:]
    return page


def without_source(sentences: Sequence[Sentence], quoted: Sequence[str], page: str) -> list[str]:
    """The measured numbers in the prose of a page that no sentence gives, and that are not in a quoted text."""
    places = [sentence.found(page) for sentence in sentences]
    known = [place.span(i) for place in places for i in range(1, 1 + len(place.groups()))]
    known += [Sentence(text).found(page).span() for text in quoted]
    prose = NO_PROSE.sub(lambda other: " " * len(other[0]), page)
    return [
        f"{found[0]} in {' '.join(page[max(0, found.start() - 40) : found.end() + 20].split())!r}"
        for found in MEASURED.finditer(prose)
        if not any(start <= found.start() and found.end() <= end for start, end in known)
    ]
