"""The cycle collector rests while a program starts, and works again afterwards."""

from __future__ import annotations

import gc

import pytest

from vkit.starting import starting


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_before_afterwards(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with starting(), starting():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
        with pytest.raises(ValueError, match="mine"), starting():
            raise ValueError("mine")
        assert gc.isenabled() is is_enabled
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
