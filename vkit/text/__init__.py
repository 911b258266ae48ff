"""Text in, text out: tokenizers, incremental detokenising, stop strings, chat templates. No model, no torch."""
