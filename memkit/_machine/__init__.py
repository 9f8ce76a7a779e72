"""Machine access: devices, the host, files, random state."""
