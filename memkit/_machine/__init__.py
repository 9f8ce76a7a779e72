"""The machine: devices, the host, files, random state."""
