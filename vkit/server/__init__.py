"""One HTTP server for OpenAI, Anthropic, token-level and NIM clients. Knows the engine only through engine_protocol."""
