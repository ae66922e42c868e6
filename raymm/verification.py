"""Is this output that product?"""

from typing import Any

from raymm.sources.base import Source


def check_product(view: Any, sources: tuple[Source, ...], precision: str) -> float:
    return 0.0
