"""The Responses routes, with a store, background work and every stream event."""
