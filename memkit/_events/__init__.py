"""Memory logs: their contents, writing and reading."""
