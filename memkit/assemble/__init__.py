"""Where rooms meet: what needs two of them at once is put together here."""
