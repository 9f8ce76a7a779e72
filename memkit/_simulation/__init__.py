"""Steps on tensors without data: `simulation` is the way in; see `docs/architecture.md`."""
