"""Steps on tensors without data: `simulation` is the entry point; see `docs/architecture.md`."""
