"""Cache connectors by name: what is built in, what plug-ins bring, what a program registers itself.

A name is looked up among `register_kv_connector`'s, then the built-in ones, then the entry-point group
`vkit.cache_connectors`. Implementations are imported when chosen.
"""

from __future__ import annotations

from importlib import import_module

from vkit import discovery
from vkit.cache.connector import ConnectorContext, ConnectorFactory, KVConnector
from vkit.connectors.identity import cache_identity
from vkit.errors import UsageError

GROUP = "vkit.cache_connectors"

BUILTIN = {
    "OffloadingConnector": "vkit.connectors.offloading",
    "FileConnector": "vkit.connectors.shared_folder",
    "RedisConnector": "vkit.connectors.redis_store",
    "LMCacheConnector": "vkit.connectors.lmcache",
    "LMCacheConnectorV1": "vkit.connectors.lmcache",
}
"""Name -> the module whose `make` builds it."""

_registered: dict[str, ConnectorFactory] = {}


def register_kv_connector(name: str, factory: ConnectorFactory) -> None:
    """Make a connector known to this process under `name`, which --kv-transfer-config then takes.

    Raises:
        ValueError: the name is taken, or empty.
    """
    if not name or name in _registered or name in BUILTIN:
        raise ValueError(f"register_kv_connector: {name!r}: the name is {'taken' if name else 'empty'}")
    _registered[name] = factory


def known_connectors() -> list[str]:
    """Every name that can be chosen."""
    return sorted({*_registered, *BUILTIN, *discovery.find(GROUP).offers})


def make_connector(context: ConnectorContext) -> KVConnector:
    """The connector that the configuration names.

    Raises:
        UsageError: no such name, settings that cannot be, or a model it cannot serve.
        PluginError: a plug-in's connector that cannot be loaded.
    """
    name = context.config.kv_connector
    if name in _registered:
        return _registered[name](context).checked(name, context.groups)
    if name in BUILTIN:
        connector: KVConnector = import_module(BUILTIN[name]).make(context)
        return connector.checked(name, context.groups)
    offer = discovery.find(GROUP).offers.get(name)
    if offer is None:
        raise UsageError(
            f"--kv-transfer-config: kv_connector: unknown connector {name!r}",
            remedy=f"registered: {', '.join(known_connectors())}",
        )
    factory: ConnectorFactory = discovery.load(offer, lambda made: made)
    return factory(context).checked(name, context.groups)


__all__ = ["BUILTIN", "GROUP", "cache_identity", "known_connectors", "make_connector", "register_kv_connector"]
