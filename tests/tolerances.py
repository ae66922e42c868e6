"""How far a product may be from the exact one: the classic bound for sums of products."""

import numpy as np

ROUNDOFF = {
    np.dtype(np.float16): 2.0**-11,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float64): 2.0**-53,
    np.dtype(np.complex64): 2.0**-24,
    np.dtype(np.complex128): 2.0**-53,
}
BFLOAT16_ROUNDOFF = 2.0**-8
SMALLEST_FLOAT16 = 2.0**-24


def assert_product(computed, factors, *, compute=None, bfloat16_roundings=0):
    """Assert that `computed` is the product of `factors`, within the error that cannot be avoided.

    ``|computed - exact| <= g * (|F1| @ |F2| @ ...)`` with ``g = n u / (1 - n u)``, n the sum of the
    inner dimensions and u the roundoff of `compute` (default: of the result's dtype); each operand
    that is first rounded to bfloat16 adds a factor. The reference is a float64 product, whose own
    error by the same formula is added, as is one rounding to the dtype of the result.
    """
    computed = np.asarray(computed)
    dtype = computed.dtype
    roundoff = ROUNDOFF[np.dtype(compute or dtype)]
    exact, size = reference(factors)
    assert computed.shape == exact.shape
    inner = sum(np.asarray(factor).shape[-1] for factor in factors[:-1])
    terms = 4 * inner if dtype.kind == "c" else inner  # a complex product is four real ones
    bound = (growth(terms, roundoff, bfloat16_roundings) + growth(terms, 2.0**-53)) * size
    bound = bound + ROUNDOFF[dtype] * (np.abs(exact) + bound)
    if dtype == np.float16:
        bound = bound + SMALLEST_FLOAT16
    error = np.abs(computed.astype(exact.dtype) - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert (error <= bound).all(), (
        f"entry {worst}: {computed[worst]} instead of {exact[worst]}, "
        f"error {error[worst]} over {bound[worst]}"
    )


def growth(terms, roundoff, bfloat16_roundings=0):
    """Return the largest relative error of a sum of so many products."""
    plain = terms * roundoff / (1 - terms * roundoff)
    return (1 + plain) * (1 + BFLOAT16_ROUNDOFF) ** bfloat16_roundings - 1


def reference(factors):
    """Return the product and the product of the absolute values, in float64 or complex128."""
    arrays = [np.asarray(factor) for factor in factors]
    kind = np.complex128 if any(array.dtype.kind == "c" for array in arrays) else np.float64
    exact = chain_product([array.astype(kind) for array in arrays])
    return exact, chain_product([np.abs(array.astype(kind)) for array in arrays])


def exact_integers(factors):
    """Return the product of integer factors in Python's integers."""
    return chain_product([np.asarray(factor).astype(object) for factor in factors])


def chain_product(arrays):
    """Multiply from the left; the first and last may be vectors."""
    product = arrays[0]
    for array in arrays[1:]:
        product = product @ array
    return np.asarray(product)
