"""Recording of storage lifetimes, real or fake: which operator created each storage, and where."""
