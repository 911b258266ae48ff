"""Paged cache: block pool, prefix reuse, hybrid groups, tensor store."""
