"""The command line: parse, call, print, turn an error into an exit status."""

import signal
import sys
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the ``raymm`` command.

    Ctrl-C, SIGTERM and SIGHUP end it in one way: workers end, unfinished outputs are removed, the
    exit status is 128 plus the signal's number. A second signal does not cut that short.
    """
    for each in _STOPPING:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, _stop)
    from raymm.cli import commands  # noqa: PLC0415  an interrupt is handled from here on

    commands.main(prog_name="raymm")


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)
    commands = sys.modules.get("raymm.cli.commands")
    if commands is None or not getattr(commands, "IS_RUNNING", [False])[0]:
        sys.exit(128 + number)  # nothing to clean up yet
    raise KeyboardInterrupt(number)
