"""The cycle collector while the program starts: hundreds of thousands of objects come, and none of them goes.

A run of it over the modules of torch alone takes some 0.1 s, and loading a model would start several, all in vain.
For programs, not for libraries: what is alive at the end is never looked at again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting_collector() -> Iterator[None]:
    """No cycles are looked for inside; what is alive afterwards counts as there for good."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
