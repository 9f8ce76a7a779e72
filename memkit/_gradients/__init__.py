"""What a loss is, and how gradients get around a function's inside."""
