"""Recovery from out-of-memory: the only code that meets such an error, undoes what it cut off, and tries again."""
