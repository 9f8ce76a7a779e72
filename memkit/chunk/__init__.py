"""One function in pieces: forward and backward bounded by the chunk."""
