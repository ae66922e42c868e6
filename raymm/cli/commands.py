"""The commands.

Results go to stdout, everything else to stderr. Status 0: done; 1: could not finish; 2: the request
was wrong and nothing has run; 130: interrupted.
"""

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import click
import numpy as np

from raymm.cli import demo as demos
from raymm.cli import info as infos
from raymm.cli import options
from raymm.cli.reports import Listener, run_facts, run_summary, say, show
from raymm.engines.base import Engine
from raymm.errors import PlanError, RaymmError, SinkError, SinkExistsError, SourceError
from raymm.memory import format_nbytes
from raymm.plan import Plan
from raymm.product import chain
from raymm.request import Precision
from raymm.sinks import Npy, Sink, as_sink

VERSION: str = sys.modules["raymm"].__version__
"""Read from the package that is being imported: a module of it does not import it."""


IS_RUNNING = [False]
"""Whether a command has begun, so that an interrupt must let it clean up."""


class Commands(click.Group):
    """Commands whose errors become one message on stderr and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        listener = ctx.obj = Listener()
        IS_RUNNING[0] = True
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            names = " or ".join(listener.outputs)
            say("interrupted" + (f": nothing new appears as {names}" if names else ""))
            number = error.args[0] if error.args else signal.SIGINT
            ctx.exit(128 + number)
        except RaymmError as error:
            is_early = isinstance(error, (SourceError, SinkError)) and not listener.has_started
            # An OSError puts its number before the message.
            hint = " (--overwrite)" if isinstance(error, SinkExistsError) else ""
            say(f"error: {getattr(error, 'strerror', None) or error}{hint}")
            ctx.exit(2 if is_early or isinstance(error, PlanError) else 1)
        except MemoryError as error:
            say(f"error: out of memory {error}: give --memory-limit or lower --tile-columns")
            ctx.exit(1)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, prog_name="raymm")
def main() -> None:
    """Multiply a chain of matrices, one of which may be far larger than memory.

    Operands are .npy files, members of .npz archives (c.npz::C), Parquet and Arrow tables (files,
    folders, globs, addresses such as s3://bucket/C; one vector a row); A.npy.T is the transpose of
    A.npy. The result is written tile by tile and appears under its name when it is complete.

    Example: raymm run A.npy B.npy C.npy --out D.npy
    """


@main.command()
@options.operands
@click.option("--out", help="Where D would go, see run. Without it: into memory.")
@options.request
@options.as_json
def plan(  # noqa: PLR0913  one parameter for each option
    operands: tuple[str, ...],
    column: str | None,
    null: Literal["nan"] | None,
    out: str | None,
    order: Any,
    dtype: np.dtype[Any] | None,
    precision: Precision,
    engine: str,
    num_workers: int | None,
    address: str | None,
    memory_limit: str | None,
    tile_columns: int | None,
    max_in_flight: int,
    as_json: bool,
) -> None:
    """Print what a run would do, needs, and is limited by.

    Nothing is computed. Status 2 if the run would be refused for lack of memory or disk.

    Example: raymm plan A.npy B.npy C.npy --out D.npy
    """
    with _open_engine(engine, num_workers, address) as chosen:
        made = chain(operands, column=column, null=null).plan(
            None if out is None else _sink(out, order),
            dtype=dtype,
            precision=precision,
            engine=chosen,
            memory_limit=memory_limit,
            tile_columns=tile_columns,
            max_in_flight=max_in_flight,
        )
    show(made.to_dict() if as_json else str(made))
    made.check_memory()
    _check_disk(made)


@main.command()
@options.operands
@click.option(
    "--out",
    "outs",
    required=True,
    multiple=True,
    help="Where D goes: .npy, .parquet, .arrow, .zarr or an address (s3://...). Repeatable.",
)
@options.request
@click.option("--overwrite", is_flag=True, help="Replace D once the new one is complete.")
@click.option("--verify", is_flag=True, help="Check D before it appears under its name.")
@options.progress
@options.as_json
@click.pass_obj
def run(  # noqa: PLR0913  one parameter for each option
    listener: Listener,
    operands: tuple[str, ...],
    column: str | None,
    null: Literal["nan"] | None,
    outs: tuple[str, ...],
    order: Any,
    dtype: np.dtype[Any] | None,
    precision: Precision,
    engine: str,
    num_workers: int | None,
    address: str | None,
    memory_limit: str | None,
    tile_columns: int | None,
    max_in_flight: int,
    overwrite: bool,
    verify: bool,
    progress: bool,
    as_json: bool,
) -> None:
    """Multiply the operands and write D.

    Example: raymm run A.npy B.npy C.npy --out D.npy --verify
    """
    product, sinks = chain(operands, column=column, null=null), [_sink(out, order) for out in outs]
    listener.outputs = outs
    with _open_engine(engine, num_workers, address) as chosen, listener.showing(progress):
        product.run(
            *sinks,
            dtype=dtype,
            precision=precision,
            engine=chosen,
            memory_limit=memory_limit,
            tile_columns=tile_columns,
            max_in_flight=max_in_flight,
            overwrite=overwrite,
            verify=verify,
            progress=listener,
        )
    show(run_facts(listener) if as_json else run_summary(listener))


@main.command()
@click.argument("output", metavar="D.npy")
@options.operands
@options.precision
@options.as_json
def verify(
    output: str,
    operands: tuple[str, ...],
    column: str | None,
    null: Literal["nan"] | None,
    precision: Precision,
    as_json: bool,
) -> None:
    """Check that the file D.npy is the product of the others.

    All of it is compared by weighted sums of its columns (Freivalds), some columns entry by entry.
    Status 1 if it is another matrix.

    Example: raymm verify D.npy A.npy B.npy C.npy
    """
    findings = chain(operands, column=column, null=null).verify(output, precision=precision)
    if as_json:
        show({"output": output, **asdict(findings)})
        return
    unjudged = f", {findings.unjudged:,} hold NaN or Inf" if findings.unjudged else ""
    show(
        f"{output} is the product: the largest error is {findings.residual:.3g} of what rounding "
        f"allows\n{findings.columns:,} sums compared, {findings.sampled} of them entry by entry"
        f"{unjudged}"
    )


@main.command()
@options.as_json
def info(as_json: bool) -> None:
    """Print versions, devices, memory, and what --engine auto chooses.

    Example: raymm info --json
    """
    facts = infos.machine_facts(VERSION)
    show(facts if as_json else infos.machine_table(facts))


@main.command()
@click.option("--full", is_flag=True, help="3,600,000 columns: D takes 43.2 GB.")
@click.option("--columns", type=click.IntRange(1), help="Columns of C and D. Default: 400,000.")
@click.option("--folder", help="Where to put the files. Default: a new folder below this one.")
@click.option("--keep", is_flag=True, help="Do not remove the files at the end.")
@options.engine("ray")
@options.progress
@options.as_json
@click.pass_obj
def demo(  # noqa: PLR0913  one parameter for each option
    listener: Listener,
    full: bool,
    columns: int | None,
    folder: str | None,
    keep: bool,
    engine: str,
    progress: bool,
    as_json: bool,
) -> None:
    """Run the main job end to end on inputs made for it.

    D = A @ B @ C, on Ray, verified. A is 3000 x 100, B 100 x 100, C 100 x 400,000, all float32.

    Example: raymm demo --full
    """
    width = columns or (demos.FULL_COLUMNS if full else demos.COLUMNS)
    with demos.demo_folder(folder, keep) as path:
        demos.check_space(path, width)
        output = str(path / "D.npy")
        listener.outputs = (output,)
        say(f"making A, B and C in {path}")
        product = chain(demos.make_inputs(path, width))
        made = product.plan(output, engine=engine, verify=True)
        if not as_json:
            show(f"{made}\n")
        with listener.showing(progress):
            product.write(output, engine=engine, verify=True, progress=listener)
        facts = {"plan": made.to_dict(), "run": run_facts(listener)}
        show(facts if as_json else run_summary(listener))


@contextmanager
def _open_engine(name: str, num_workers: int | None, address: str | None) -> Iterator[str | Engine]:
    """Yield what a verb takes as ``engine=``; one that is made here ends with the command."""
    if num_workers is None and address is None:
        yield name
        return
    if name == "local":
        raise PlanError(
            "--num-workers and --address are of Ray: leave them out with --engine local"
        )
    from raymm.engines.actors import RayEngine  # noqa: PLC0415  Ray takes a second to import

    with RayEngine(num_workers, address=address) as engine:
        yield engine


def _sink(out: str, order: Any) -> Sink:
    sink = as_sink(out)
    return Npy(out, order) if isinstance(sink, Npy) else sink


def _check_disk(made: Plan) -> None:
    free = made.free_disk_nbytes
    if free is not None and made.output_nbytes > free:
        raise SinkError(
            errno.ENOSPC,
            f"{made.output} needs {made.output_nbytes:,} bytes "
            f"({format_nbytes(made.output_nbytes)}), {free:,} are free ({format_nbytes(free)}): "
            "use another disk or free some space",
        )
