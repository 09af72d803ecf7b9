"""Pictures show the names of classes as they are."""

from io import BytesIO

import numpy as np
from matplotlib.text import Text

from engine.records.confusion_picture import confusion_picture


def test_names_are_shown_literally():
    """A $ would begin a formula, and a byte that is not UTF-8 would stop matplotlib."""
    figure = confusion_picture(np.eye(3, dtype=int), ("Straße", "$a", "b\udcff"), "$x")
    figure.savefig(BytesIO())
    shown = {text.get_text() for text in figure.findobj(Text)}
    assert {"Straße", "$a", "$x"} <= shown and not any("\udcff" in text for text in shown)
