"""vkit: run open language models from one command or as a library.

Public names are resolved on first use, so `import vkit` costs no torch import.
"""

from __future__ import annotations

__version__ = "0.1.0"
