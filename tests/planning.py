"""Plans of shapes alone: nothing is read, no engine is asked."""

import numpy as np

from raymm.operands import Operand
from raymm.order import arrange, output_dtype
from raymm.plan import Target, make_plan
from raymm.request import Request, Resources
from raymm.sinks import Array, Npy
from raymm.sinks.base import OutputSpec

MAIN_JOB = ((3000, 100), (100, 100), (100, 3_600_000))
LOCAL = Resources("local", 1, 2, 16 * 2**30)


def describe(*shapes, dtype=np.float32, path=None):
    """Return operands of these shapes, in C order."""
    dtype = np.dtype(dtype)
    return tuple(
        Operand(
            "ABCDEFGHIJ"[place],
            shape,
            dtype,
            c_strides(shape, dtype.itemsize),
            path,
            is_held=path is None,
        )
        for place, shape in enumerate(shapes)
    )


def c_strides(shape, itemsize):
    strides = []
    for length in reversed(shape):
        strides.insert(0, itemsize)
        itemsize *= length
    return tuple(strides)


def plan_of(shapes, sink=None, *, dtype=np.float32, resources=LOCAL, path=None, **request):
    """Return the plan of a chain; `sink` defaults to a C-order file."""
    chained = arrange(describe(*shapes, dtype=dtype, path=path))
    sink = sink or Npy("D.npy")
    request = Request(**request)
    result = output_dtype(chained.dtype, request.dtype)
    spec = OutputSpec(chained.rows, chained.columns, chained.is_transposed, chained.shape, result)
    target = Target(sink.name, sink.layout(spec), isinstance(sink, Array), 10**12)
    return make_plan(chained, target, request, resources)
