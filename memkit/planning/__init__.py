"""Planning room: what a training step will need, known before it runs."""
