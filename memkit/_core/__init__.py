"""Core: errors, units, settings and records shared by all packages."""
