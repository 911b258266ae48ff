"""--kv-transfer-config: every key, every type, every refusal; names from the registry and from plug-ins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.connected import context_of
from vkit import KVConnector, SchedulerSide, WorkerSide, register_kv_connector
from vkit.config import EngineArgs
from vkit.connectors import _registered, known_connectors, make_connector
from vkit.errors import UsageError
from vkit.kv_transfer import KVTransferConfig
from vkit.loading import check_model

GOOD = {"kv_connector": "FileConnector", "kv_role": "kv_both"}


def test_defaults_and_text() -> None:
    parsed = KVTransferConfig.parse(json.dumps(GOOD))
    assert (parsed.engine_id, parsed.kv_load_failure_policy, dict(parsed.kv_connector_extra_config)) == (
        "vkit",
        "fail",
        {},
    )
    assert parsed.loads
    assert parsed.stores
    assert KVTransferConfig.parse(parsed.as_json()) == parsed
    args = EngineArgs(model="m", kv_transfer_config={**GOOD, "kv_role": "kv_producer"})
    assert isinstance(args.kv_transfer_config, KVTransferConfig)
    assert not args.kv_transfer_config.loads


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ({}, "kv_connector is required"),
        ({"kv_connector": "FileConnector"}, "kv_role is required"),
        ({**GOOD, "kv_connector": 3}, "kv_connector: expected a non-empty string"),
        (
            {**GOOD, "kv_role": "both"},
            r"kv_role: unknown role 'both', did you mean kv_both\? \(expected one of kv_producer, kv_consumer",
        ),
        ({**GOOD, "kv_role": "zzz"}, r"kv_role: unknown role 'zzz' \(expected one of"),
        ({**GOOD, "kv_load_failure_policy": "ignore"}, "kv_load_failure_policy: expected one of fail, recompute"),
        ({**GOOD, "kv_conector": "x"}, "unknown key 'kv_conector', did you mean kv_connector"),
        ({**GOOD, "kv_parallel_size": 2}, "kv_parallel_size is known but not implemented"),
        ({**GOOD, "kv_connector_extra_config": [1]}, "expected an object"),
        ({**GOOD, "kv_connector_extra_config": {"a": None}}, "a: expected a string, number or boolean"),
        ({**GOOD, "engine_id": ""}, "engine_id: expected a non-empty string"),
    ],
)
def test_refusals(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineArgs(model="m", kv_transfer_config=value)


def test_an_unknown_connector_lists_the_known() -> None:
    config = KVTransferConfig("Nope", "kv_both")
    with pytest.raises(UsageError, match=r"unknown connector 'Nope'.*FileConnector"):
        make_connector(context_of(config))


def test_an_unknown_connector_is_refused_before_the_model_is_looked_at() -> None:
    settings = {**GOOD, "kv_connector": "fileconector"}
    with pytest.raises(UsageError, match="unknown connector 'fileconector', did you mean FileConnector"):
        check_model(EngineArgs(model="/no/such/model", kv_transfer_config=settings))


def test_a_registered_connector_is_built_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registered, "Mine", raising=False)
    built: list[Any] = []

    def factory(context: Any) -> KVConnector:
        built.append(context)
        return KVConnector(SchedulerSide(), WorkerSide() if len(built) == 1 else None)

    register_kv_connector("Mine", factory)
    try:
        assert "Mine" in known_connectors()
        context = context_of(KVTransferConfig("Mine", "kv_both"))
        assert make_connector(context).worker is not None
        assert built == [context]
        with pytest.raises(UsageError, match="Mine has only a scheduler half"):
            make_connector(context)
        with pytest.raises(ValueError, match="taken"):
            register_kv_connector("Mine", factory)
    finally:
        del _registered["Mine"]
