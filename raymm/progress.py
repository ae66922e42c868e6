"""Progress on a terminal, and callbacks."""

from collections.abc import Iterator
from contextlib import contextmanager

from raymm.events import Callback, Event


@contextmanager
def as_callback(progress: bool | Callback) -> Iterator[Callback]:
    """Turn a verb's ``progress=`` into a callback."""
    if callable(progress):
        yield progress
    else:
        yield _ignore


def _ignore(event: Event) -> None:
    del event
