"""Names of classes: which texts may be names, and the two orders that numbers in them give."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal

from datasets.layout import first_of

ORDERS = ("text", "numbers")  # of class folders
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
_PART = re.compile(r"[0-9]+|[^0-9]")
_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}  # control characters, half a UTF-16 pair, ends of lines and paragraphs


def check_names(names: Iterable[tuple[int, object]], source: str = "") -> None:
    """ValueError, beginning with `source`, unless each name is one line of text that UTF-8 can hold, and not empty.

    `names`: with their numbers. Logs, tables and files of results could not hold others.
    """
    for number, name in names:
        if not isinstance(name, str) or not name.strip() or _UNPRINTABLE & {*map(unicodedata.category, name)}:
            shown = ascii(name)[:60]
            raise ValueError(
                f"{source}class {number} is called {shown}; expected one line of text in UTF-8, not empty: rename it"
            )


def sort_by_number(names: Iterable[str]) -> list[str]:
    """Sort names by the numbers in them: class_2 comes before class_10. -2 comes before -1 if all are numbers."""
    names = [*names]
    if all(map(_NUMBER.fullmatch, names)):
        return sorted(names, key=lambda name: (Decimal(name), name))

    def key(name: str) -> tuple[list[tuple[str, int]], str]:  # a number is compared with other characters as a digit
        return [("0", int(part)) if part[0] in "0123456789" else (part, 0) for part in _PART.findall(name)], name

    return sorted(names, key=key)


def two_orders(names: Iterable[str]) -> str | None:
    """For messages: where the order of names as text first differs from the order by number; None if they agree."""
    as_text = sorted(names)
    as_numbers = sort_by_number(as_text)
    if as_text == as_numbers:
        return None
    first = next(place for place, name in enumerate(as_text) if as_numbers[place] != name)
    start = max(0, first - 2)
    before = "…, " if start else ""
    text, numbers = (f"{before}{first_of(order[start:])}" for order in (as_text, as_numbers))
    return f"{text} as text, {numbers} as numbers"


def check_order(classes: Sequence[str], file: str, option: str | None) -> None:
    """ValueError if a file names no classes, and `classes`, sorted as text, are in another order by number.

    `file`: its name, for the message. `option`: the setting that chooses the order; None: it was chosen.
    """
    if option is None or [*classes] != sorted(classes):
        return
    orders = two_orders(classes)
    if orders is None:
        return
    raise ValueError(
        f"{file} does not name its {len(classes)} classes, and the dataset's have two orders: {orders}. Give "
        f"{option}=text or {option}=numbers, as in its training (torchvision's ImageFolder sorts as text)"
    )
