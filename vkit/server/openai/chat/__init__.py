"""The chat route: request, whole reply, stream."""
