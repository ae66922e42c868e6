"""Options that several commands share."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import click
import numpy as np

from raymm.request import PRECISIONS

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator: TypeAlias = Callable[[Any], Any]


def parse_dtype(value: str) -> np.dtype[Any]:
    """Return a NumPy dtype by its name."""
    try:
        return np.dtype(value)
    except TypeError as error:
        message = f"{value!r} is no dtype of NumPy, such as float32"
        raise click.BadParameter(message) from error


def engine(default: str) -> Decorator:
    """Return the option that chooses where to compute."""
    return click.option(
        "--engine",
        type=click.Choice(["auto", "local", "ray"]),
        default=default,
        show_default=True,
        help="This process, or Ray workers.",
    )


_OPERANDS = (
    click.argument("operands", nargs=-1, required=True, metavar="A.npy B.npy ..."),
    click.option(
        "--column", help="Column of tables in which several could be meant; also C.parquet::name."
    ),
    click.option(
        "--null", type=click.Choice(["nan"]), help="Nulls of tables become NaN; else: refused."
    ),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
progress = click.option(
    "--progress/--no-progress", default=True, help="Draw a bar if stderr is a terminal."
)
precision = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="strict",
    show_default=True,
    help="Of the arithmetic; strict keeps float32 float32.",
)

_REQUEST = (
    click.option(
        "--order",
        type=click.Choice(["C", "F"]),
        default="C",
        show_default=True,
        help="Order of D in the file: rows (C) or columns (F) are contiguous.",
    ),
    click.option(
        "--dtype", type=parse_dtype, metavar="DTYPE", help="Convert D at the end, e.g. to float32."
    ),
    precision,
    engine("auto"),
    click.option(
        "--num-workers", type=click.IntRange(1), help="Ray workers; with auto it means ray."
    ),
    click.option("--address", help="Ray cluster to join; with auto it means ray."),
    click.option(
        "--memory-limit", metavar="SIZE", help='Memory that one process may add, like "8GiB".'
    ),
    click.option("--tile-columns", type=click.IntRange(1), help="Columns of D in one tile."),
    click.option(
        "--max-in-flight",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="Tiles handed to one worker at a time.",
    ),
)


def operands(command: Command) -> Command:
    """Add the operands, and the options that say how to read them."""
    return _with(_OPERANDS, command)


def request(command: Command) -> Command:
    """Add the options that say how to carry out a product."""
    return _with(_REQUEST, command)


def _with(decorators: tuple[Decorator, ...], command: Command) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
