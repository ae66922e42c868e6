"""Every error that raymm raises on purpose.

::

    RaymmError
      PlanError(ValueError)          nothing has run, nothing was written
        ShapeError
        DTypeError(TypeError)
        MemoryLimitError(MemoryError)
      SourceError(OSError)           an input cannot be read
      SinkError(OSError)             an output cannot be created, written or committed
        SinkExistsError(FileExistsError)
      ExecutionError(RuntimeError)   work started and could not finish
        WorkerStartError
        TileError
        ResultOverflowError(OverflowError)
      VerificationError

All arguments are positional and reach ``super().__init__``, so that every error survives a
pickle round trip between processes.
"""


class RaymmError(Exception):
    """The base of all errors of raymm."""


class PlanError(RaymmError, ValueError):
    """The request cannot be carried out; nothing has run, nothing was written."""


class ShapeError(PlanError):
    """The operands do not chain, or an output cannot hold the result's shape."""


class DTypeError(PlanError, TypeError):
    """An operand's dtype has no exact product here, or `dtype` cannot follow from it."""


class MemoryLimitError(PlanError, MemoryError):
    """The request needs more memory than it may use; raised before any compute."""

    def __init__(self, message: str = "", projected_nbytes: int = 0, memory_limit: int = 0) -> None:
        super().__init__(message, projected_nbytes, memory_limit)
        self.projected_nbytes = projected_nbytes
        """What the request would need, in bytes."""
        self.memory_limit = memory_limit
        """What it may use, in bytes."""

    def __str__(self) -> str:
        return str(self.args[0])


class SourceError(RaymmError, OSError):
    """An input cannot be read."""


class SinkError(RaymmError, OSError):
    """An output cannot be created, written or committed; ``errno`` is kept where there is one."""


class SinkExistsError(SinkError, FileExistsError):
    """The output exists and ``overwrite=True`` was not given."""


class ExecutionError(RaymmError, RuntimeError):
    """Work started and could not finish."""


class WorkerStartError(ExecutionError):
    """A worker never became ready: what was asked of the cluster and what it has."""


class TileError(ExecutionError):
    """A tile failed after every attempt; the original error is ``__cause__``."""

    def __init__(
        self, message: str = "", tile: object = None, device: str = "", attempts: int = 0
    ) -> None:
        super().__init__(message, tile, device, attempts)
        self.tile, self.device, self.attempts = tile, device, attempts

    def __str__(self) -> str:
        return str(self.args[0])


class ResultOverflowError(ExecutionError, OverflowError):
    """``dtype=`` cannot hold a value of the result."""


class VerificationError(RaymmError):
    """An output is not the product it should be."""
