"""Tables of what was measured in turns."""

import subprocess

from scripts.reports.markdown import WIDTH, compared, escaped, in_lines, medians, unfolded

ITEMS = [
    [
        {"way": "old", "peak_bytes": 2**21, "times_ms": [2.0, 4.0], "names": ["a", "b|"]},
        {"way": "new", "peak_bytes": 2**20, "times_ms": [1.0, 8.0], "names": []},
        {"way": "bad", "reason": "failed"},
    ],
    [{"way": "new", "peak_bytes": 2**20, "times_ms": [3.0]}, {"way": "old", "peak_bytes": 2**20, "times_ms": [2.0]}],
    [{"way": "new", "peak_bytes": None, "times_ms": [0.1234567]}],
]


def test_names_are_no_html_and_end_no_line():
    assert escaped("a<b>|`[c](d)\n\x1b\udce9_1") == r"a&#60;b&#62;&#124;&#96;&#91;c&#93;(d)\n\x1b\udce9_1"


def test_rows_are_relative_to_a_row_of_their_item():
    assert compared(ITEMS, "way", "old").splitlines() == [
        "| way | peak, MiB | / old | times, ms | / old | names |",
        "|---|---:|---:|---:|---:|---:|",
        "| old | 2.00 | 1 | 3 | 1 | a b\\| |",
        "| new | 1.00 | 0.50 | 4.5 | 1.25 (0.88 – 1.62) |  |",
        "| new | 1.00 | 1.00 | 3 | 1.50 |  |",
        "| old | 1.00 | 1 | 2 | 1 |  |",
        "| new |  |  | 0.1235 |  |  |",
    ]


def test_medians_are_of_the_items_that_have_both():
    assert medians(ITEMS, "way", "old").splitlines() == [
        "| way | items | peak / old | times / old |",
        "|---|---:|---:|---:|",
        "| new | 2 | 0.75 (0.50 – 1.00) | 1.38 (1.25 – 1.50) |",
    ]


def test_lines_are_short_and_a_shell_reads_the_same_command():
    names = ",".join(f"network{number}" for number in range(40))
    command = f'printf %s\\\\n only=[{names}] \'a=["{"long, " * 30}"]\' "title={"of words " * 30}"'
    prose = "- one: " + "word " * 80
    text = in_lines(f"```\n{command}\n```\n\n{prose}\n| {'a table, ' * 40}|")
    lines = text.splitlines()
    assert unfolded(text).splitlines()[1] == command and command not in text
    assert all(len(line) <= WIDTH or "'" in line for line in lines[:-1]) and len(lines[-1]) > 300
    assert [line[:2] for line in lines if "word " in line and "title" not in line][:3] == ["- ", "  ", "  "]
    said = [subprocess.check_output(["bash", "-c", each]) for each in (command, text.split("```")[1])]
    assert said[0] == said[1] and said[0].count(b"\n") == 3
