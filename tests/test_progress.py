"""The one progress bar: what it shows on a terminal, and that it is silent elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from octavo.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stands for stderr. No fixture, for pytest sets stderr anew after those."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return screen


@pytest.mark.parametrize("from_caller", [False, True])
def test_a_bar_with_a_unit_and_a_note(from_caller: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with Progress(4, "compressing [int4]", unit="blocks", from_caller=from_caller) as progress:
        progress.advance()
        progress.update(3, note="error [q] 0.01")
    shown = terminal.getvalue()
    assert "compressing [int4]" in shown
    assert "3/4" in shown
    assert "blocks" in shown
    assert "error [q] 0.01" in shown


def test_a_bar_whose_total_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with Progress(None, "windows") as progress:
        progress.update(1, 4)
    assert "25%" in terminal.getvalue().replace(" ", "")


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with Progress(2, "hidden", enabled=False) as progress:
        progress.advance()
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with Progress(2, "piped") as progress:
        progress.update(1, note="x")
    assert plain.getvalue() == ""
