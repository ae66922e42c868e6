"""A bar on a terminal, events for a callable, nothing otherwise."""

import io
import sys

import pytest

from raymm.errors import PlanError
from raymm.events import RunFinished, RunStarted, TileFinished, TileRetried, WorkerLost
from raymm.progress import as_callback, progress_text
from raymm.tiles import Tile
from tests.doubles import CountingCallback

GB = 10**9


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def become_terminal(monkeypatch):
    """Return what makes stderr a terminal; within the test, as capturing sets it before."""

    def become():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        return stream

    return become


def finished(done, nbytes=GB):
    return TileFinished(Tile(done - 1, 0, 1), "worker-0", done, nbytes, 1.0, 0.1, 0.5, 0.4)


def send(notify, *events):
    for event in events:
        notify(event)


def interrupted_events():
    yield RunStarted(2, 2 * GB, "local")
    raise KeyboardInterrupt


def test_true_draws_a_bar_on_a_terminal(become_terminal):
    terminal = become_terminal()
    with as_callback(True) as notify:
        send(notify, RunStarted(2, 2 * GB, "local"), finished(1), finished(2))
    drawn = terminal.getvalue()
    assert "2/2 tiles, 2 of 2 GB" in drawn
    assert "finishing" in drawn


def test_what_goes_wrong_is_told_above_the_bar(become_terminal):
    terminal = become_terminal()
    with as_callback(True) as notify:
        send(
            notify,
            RunStarted(2, 2 * GB, "ray"),
            WorkerLost("worker-1", "it was [killed]"),
            TileRetried(Tile(7, 0, 1), 1, "its worker died"),
            RunFinished((1, 1), 8, 1.0, "ray", 1, 1, 1, "write", 0.0, None),
        )
    drawn = terminal.getvalue()
    assert "worker-1 was lost and is being replaced: it was [killed]" in drawn
    assert "tile 7 is repeated: its worker died" in drawn


def test_the_bar_goes_away_with_an_error(become_terminal):
    terminal = become_terminal()
    with pytest.raises(KeyboardInterrupt), as_callback(True) as notify:
        send(notify, *interrupted_events())
    assert terminal.getvalue().endswith("\x1b[2K")  # erased


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_true_is_silent_where_there_is_no_terminal(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with as_callback(True) as notify:
        send(notify, RunStarted(1, GB, "local"), finished(1))
    assert stream is None or stream.getvalue() == ""


def test_false_is_silent_on_a_terminal_too(become_terminal):
    terminal = become_terminal()
    with as_callback(False) as notify:
        send(notify, RunStarted(1, GB, "local"), finished(1))
    assert terminal.getvalue() == ""


def test_a_callable_gets_the_events(become_terminal):
    terminal = become_terminal()
    callback = CountingCallback()
    events = [RunStarted(1, GB, "local"), finished(1)]
    with as_callback(callback) as notify:
        send(notify, *events)
    assert callback.events == events
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("progress", [None, "yes", 1])
def test_anything_else_is_refused(progress):
    with pytest.raises(PlanError, match="give True, False or a callable"), as_callback(progress):
        pass


@pytest.mark.parametrize(
    ("tiles", "done", "total", "seconds", "text"),
    [
        (0, 0, 4 * GB, 1.0, "0/8 tiles, 0 of 4 GB"),
        (0, 0, 0, 0.0, "0/8 tiles, 0 of 0 B"),
        (1, GB // 2, 4 * GB, 0.25, "1/8 tiles, 0.5 of 4 GB, 2 GB/s, 0:02 left"),
        (4, 2 * GB, 4 * GB, 100.0, "4/8 tiles, 2 of 4 GB, 20 MB/s, 1:40 left"),
        (1, GB, 4 * GB, 1300.0, "1/8 tiles, 1 of 4 GB, 769 kB/s, 1:05:00 left"),
        (8, 4 * GB, 4 * GB, 2.0, "8/8 tiles, 4 of 4 GB, 2 GB/s, finishing"),
        (4, 150_000, 600_000, 0.1, "4/8 tiles, 150 of 600 kB, 1.5 MB/s, 0:00 left"),
    ],
)
def test_text_beside_the_bar(tiles, done, total, seconds, text):
    assert progress_text(tiles, 8, done, total, seconds) == text


def test_rich_is_loaded_for_a_bar_only(run_python):
    code = """
import sys
import raymm
from raymm.progress import as_callback
for progress in (True, False, print):
    with as_callback(progress):
        pass
print("rich" in sys.modules)
"""
    assert run_python(code) == "False\n"
