"""Operators of a forward on a tape, so that tensors saved for backward can be made again from others."""
