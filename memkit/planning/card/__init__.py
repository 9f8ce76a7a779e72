"""A card that is not there: its tensors, its operators, its allocator."""
