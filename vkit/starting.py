"""What a program need not do while it starts: look for cycles.

For programs, not for libraries: what is alive at the end is never looked at again by the collector.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Modules are imported and a model is loaded inside, while the cycle collector rests.

    Hundreds of thousands of objects come and none goes, and each of the collector's walks over the modules of torch
    takes some 0.1 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
