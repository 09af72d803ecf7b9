"""Tables and lines of pages in Markdown, and what they say of an environment and of several scores."""

import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence

from datasets.file_list import printable

WIDTH = 140  # of the lines of pages, in characters


def escaped(name: object) -> str:
    """A name of a file or class in prose or a table, where Markdown would take some characters for HTML or its own."""
    return re.sub(r"[&<>|`\[\]]", lambda match: f"&#{ord(match[0])};", printable(name))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the columns after the first `left` hold numbers."""
    rule = "|" + "".join("---|" if number < left else "---:|" for number in range(len(titles)))
    header, *lines = (f"| {' | '.join(cells)} |" for cells in [titles, *rows])
    return "\n".join([header, rule, *lines])


def in_lines(text: str) -> str:
    """A text whose prose and commands have lines of at most `WIDTH` characters, where they have a space or a comma.

    A shell reads the lines of a command as one.
    """
    lines = []
    is_code = False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if len(line) <= WIDTH or line.startswith(("|", "!", "#")):
            lines.append(line)
        elif is_code:
            lines.append(_folded(line))
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


def _folded(command: str) -> str:
    """A command in lines of `WIDTH` characters, of which all but the last end in a backslash.

    None ends within quotes, where a shell would take the backslash as part of the text.
    """
    lines = [""]
    for part in re.findall(r"(?:'[^']*'|[^ ,'])*[ ,]?", command):
        if lines[-1] and len(lines[-1] + part) >= WIDTH:
            lines.append("")
        lines[-1] += part
    return "\\\n".join(lines)


def unfolded(text: str) -> str:
    """Commands in one line each."""
    return text.replace("\\\n", "")


def conditions(environment: dict) -> str:
    """Hardware, threads if known, versions and commit; if the commit does not hold the code that ran, why not."""
    count = environment.get("threads")
    threads = "" if count is None else f", {count} threads" if count > 1 else f", {count} thread"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    why_other_code = f" ({environment['provenance']})" if "provenance" in environment else ""
    return f"{environment['hardware']}{threads}; {versions}; commit {environment['commit']}{why_other_code}"


def mean_of(percentages: Sequence[float], digits: int = 2) -> str:
    """The mean and, of several, their standard deviation; a dash without any."""
    if len(percentages) < 2:
        return f"{percentages[0]:.{digits}f}" if percentages else "–"
    return f"{statistics.mean(percentages):.{digits}f} ± {statistics.stdev(percentages):.{digits}f}"
