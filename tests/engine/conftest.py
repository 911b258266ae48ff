"""Long random runs are for people who ask for them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked soak unless -m names it."""
    if "soak" not in (config.option.markexpr or ""):
        for item in items:
            if item.get_closest_marker("soak") is not None:
                item.add_marker(pytest.mark.skip(reason="a long run: -m soak"))
