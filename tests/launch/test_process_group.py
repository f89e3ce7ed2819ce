"""Lines that processes print, as the launcher relays them."""

import io
import sys

import pytest

from spmd.launch.process_group import escape_control_characters, start_processes, to_stdout


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext é\n", "plain\ttext é\n"),
        ("\x1b[1;31mred\x1b[0m\n", "\x1b[1;31mred\x1b[0m\n"),
        ("\x1b[32mgreen\n", "\x1b[32mgreen\x1b[0m\n"),
        ("\x1b]0;title\x07\n", "\\x1b]0;title\\x07\n"),
        ("\x1b]52;c;ZXZpbA==\x1b\\\n", "\\x1b]52;c;ZXZpbA==\\x1b\\\n"),
        ("\x1b[2J\x1b[Aup\x9b2J\x08\n", "\\x1b[2J\\x1b[Aup\\x9b2J\\x08\n"),
        ("\x1b[5n\x1bP+q\x1b[>m", "\\x1b[5n\\x1bP+q\\x1b[>m"),
    ],
)
def test_control_sequences_are_spelled_out_and_colours_kept(line, shown):
    assert escape_control_characters(line) == shown


def test_relayed_lines_cannot_control_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    words = [sys.executable, "-c", r"print('\x1b]0;x\x07\x1b[2J\x1b[31mred')"]
    with start_processes({0: (words, {})}, lambda rank: "[0] ", write=to_stdout) as group:
        group.wait(grace=5.0)
    assert sys.stdout.getvalue() == "[0] \\x1b]0;x\\x07\\x1b[2J\x1b[31mred\x1b[0m\n"
