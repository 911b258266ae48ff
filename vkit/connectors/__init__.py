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
from vkit.kv_transfer import FLAG, closest

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


def check_connector_name(name: str) -> None:
    """Look a name up; nothing is imported.

    Raises:
        UsageError: nobody knows it; names the closest and lists all.
    """
    known = known_connectors()
    if name not in known:
        raise UsageError(
            f"{FLAG}: kv_connector: unknown connector {name!r}{closest(name, known)}",
            remedy=f"registered: {', '.join(known)}",
        )


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
    check_connector_name(name)
    factory: ConnectorFactory = discovery.load(discovery.find(GROUP).offers[name], lambda made: made)
    return factory(context).checked(name, context.groups)


__all__ = [
    "BUILTIN",
    "GROUP",
    "cache_identity",
    "check_connector_name",
    "known_connectors",
    "make_connector",
    "register_kv_connector",
]
