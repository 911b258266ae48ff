"""The CPU backend: native kernels for any mix of prefill and decode, recorded once per model and replayed per step."""
