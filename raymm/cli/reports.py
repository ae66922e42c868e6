"""What commands print, and what they listen to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click

from raymm.events import Callback, Event, RunFinished, RunStarted
from raymm.memory import format_nbytes
from raymm.operands import format_shape
from raymm.progress import as_callback


@dataclass
class Listener:
    """What one invocation has seen of its run."""

    outputs: tuple[str, ...] = ()
    has_started: bool = False
    finished: RunFinished | None = None
    _show: Callback | None = None

    def __call__(self, event: Event) -> None:
        """Note an event and pass it on."""
        self.has_started |= isinstance(event, RunStarted)
        if isinstance(event, RunFinished):
            self.finished = event
        if self._show is not None:
            self._show(event)

    @contextmanager
    def showing(self, progress: bool) -> Iterator[None]:
        """Draw a bar meanwhile, where there is a terminal."""
        with as_callback(progress) as self._show:
            yield


def say(text: str) -> None:
    """Print something that is no result."""
    click.echo(f"raymm: {text}", err=True)


def show(result: object) -> None:
    """Print a result: text as it is, anything else as JSON."""
    click.echo(result if isinstance(result, str) else json.dumps(result, indent=2))


def table(lines: list[tuple[str, str]]) -> str:
    """Return labels and texts in two columns."""
    return "\n".join(f"{label:<10} {text}" for label, text in lines)


def run_facts(listener: Listener) -> dict[str, Any]:
    """Return what a run came to, for JSON."""
    done = listener.finished
    assert done is not None  # the verb has returned
    facts = {"outputs": list(listener.outputs), **asdict(done)}
    return facts | {"bytes_per_second": done.bytes_per_second}


def run_summary(listener: Listener) -> str:
    """Return what a run came to, for people."""
    done = listener.finished
    assert done is not None  # the verb has returned
    plural = "" if done.workers == 1 else "s"
    residual = "not verified"
    computing = done.seconds - done.verify_seconds
    if done.residual is not None:
        residual = (
            f"{done.residual:.3g} of what rounding allows, checked in {done.verify_seconds:.3g} s"
        )
    return table(
        [
            ("written", ", ".join(listener.outputs)),
            ("result", f"{format_shape(done.shape)}, {format_nbytes(done.nbytes)}"),
            ("time", f"{computing:.3g} s, {format_nbytes(done.bytes_per_second)}/s"),
            ("limit", done.limit),
            (
                "engine",
                f"{done.engine}, {done.workers} worker{plural} x {done.threads} threads, "
                f"{done.retries} tiles repeated",
            ),
            ("residual", residual),
        ]
    )
