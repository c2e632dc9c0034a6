"""Progress of long commands, where there is a terminal and where there is none."""

import io
import sys

from sparetrain_megatron.report import progress as module
from sparetrain_megatron.report.progress import Progress, progress


def test_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress("faults", 30, stream)
    for _ in range(30):
        now[0] += 1
        shown.advance()
    assert stream.getvalue().splitlines() == [
        "sparetrain: 10 of 30 faults, 10 s",
        "sparetrain: 20 of 30 faults, 20 s",
        "sparetrain: 30 of 30 faults, 30 s",
    ]


def test_short_commands_say_nothing_off_a_terminal(capsys):
    with progress("layouts", 3) as shown:
        shown.advance()
    captured = capsys.readouterr()
    assert shown.done == 1 and captured.out == captured.err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress("layouts", 2) as shown:
        shown.advance()
        shown.advance()
    assert "layouts" in stream.getvalue() and shown.done == 2
