"""Progress on a terminal, and callbacks."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raymm.errors import PlanError
from raymm.events import (
    Callback,
    Event,
    RunStarted,
    TileFinished,
    TileRetried,
    VerificationStarted,
    WorkerLost,
)
from raymm.memory import format_nbytes


@contextmanager
def as_callback(progress: bool | Callback) -> Iterator[Callback]:
    """Turn a verb's ``progress=`` into a callback.

    Parameters
    ----------
    progress : bool or callable
        True draws a bar on stderr, and nothing where that is no terminal. A callable receives the
        events (`raymm.events`) on the thread that called the verb; what it raises ends the run.
    """
    if callable(progress):
        yield progress
    elif not isinstance(progress, bool):
        raise PlanError(f"progress={progress!r}: give True, False or a callable")
    elif progress and sys.stderr is not None and sys.stderr.isatty():
        with _bar() as notify:
            yield notify
    else:
        yield _ignore


def _ignore(event: Event) -> None:
    del event


@contextmanager
def _bar() -> Iterator[Callback]:
    """Draw a bar that disappears at the end: done and total tiles, GB, GB/s, time left."""
    from rich.console import Console  # noqa: PLC0415  0.1 s, only for a terminal
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        yield _Bar(drawn)


class _Bar:
    """Events in, one task of a `rich.progress.Progress` out."""

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn
        self._task = drawn.add_task("starting", total=None)
        self._tiles = self._total = self._done = 0
        self._begin = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._tiles, self._total = event.tiles, event.nbytes
            self._begin = time.perf_counter()
            self._show(0)
        elif isinstance(event, TileFinished):
            self._done += event.nbytes
            self._show(event.done)
        elif isinstance(event, VerificationStarted):
            text = f"verifying {format_nbytes(event.nbytes)}"
            self._drawn.update(self._task, total=None, description=text)
        elif isinstance(event, WorkerLost):
            self._note(f"{event.worker} was lost and is being replaced: {event.reason}")
        elif isinstance(event, TileRetried):
            self._note(f"tile {event.tile.index} is repeated: {event.reason}")

    def _show(self, tiles: int) -> None:
        seconds = time.perf_counter() - self._begin
        text = progress_text(tiles, self._tiles, self._done, self._total, seconds)
        self._drawn.update(
            self._task, completed=self._done, total=max(self._total, 1), description=text
        )

    def _note(self, text: str) -> None:
        self._drawn.console.print(text, markup=False, highlight=False)


def progress_text(tiles: int, all_tiles: int, done: int, total: int, seconds: float) -> str:
    """Return the line beside the bar; sizes in bytes.

    Examples
    --------
    >>> progress_text(3, 12, 10_800_000_000, 43_200_000_000, 6.0)
    '3/12 tiles, 10.8 of 43.2 GB, 1.8 GB/s, 0:18 left'
    """
    whole = format_nbytes(total)
    text = f"{tiles}/{all_tiles} tiles, {_same_unit(done, total, whole)} of {whole}"
    if not done or seconds <= 0:
        return text
    if tiles == all_tiles:
        return f"{text}, {format_nbytes(done / seconds)}/s, finishing"
    left = round((total - done) * seconds / done)
    clock = f"{left // 60}:{left % 60:02}"
    if left >= 3600:
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
    return f"{text}, {format_nbytes(done / seconds)}/s, {clock} left"


def _same_unit(done: int, total: int, whole: str) -> str:
    """Return `done` in the unit in which `total` is written, without naming it."""
    number, _, _ = whole.partition(" ")
    return f"{done * float(number) / total:.3g}" if total else "0"
