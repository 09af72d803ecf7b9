"""Names and lines of pages."""

import subprocess

from scripts.reports.markdown import WIDTH, escaped, in_lines, unfolded


def test_names_are_no_html_and_end_no_line():
    assert escaped("a<b>|`[c](d)\n\x1b\udce9_1") == r"a&#60;b&#62;&#124;&#96;&#91;c&#93;(d)\n\x1b\udce9_1"


def test_lines_are_short_and_a_shell_reads_the_same_command():
    names = ",".join(f"network{number}" for number in range(40))
    command = f'printf %s\\\\n only=[{names}] \'a=["{"long, " * 30}"]\' "title={"of words " * 30}"'
    prose = "- one: " + "word " * 80
    text = in_lines(f"```\n{command}\n```\n\n{prose}\n| {'a table, ' * 40}|")
    lines = text.splitlines()
    assert unfolded(text).splitlines()[1] == command and command not in text
    assert all(len(line) <= WIDTH or "'" in line for line in lines[:-1]) and len(lines[-1]) > 300
    assert [line[:2] for line in lines if "word " in line and "title" not in line][:3] == ["- ", "  ", "  "]
    outputs = [subprocess.check_output(["bash", "-c", script]) for script in (command, text.split("```")[1])]
    assert outputs[0] == outputs[1] and outputs[0].count(b"\n") == 3
