"""Recovery from out-of-memory errors: the only code that catches them, undoes the unfinished work, and retries."""
