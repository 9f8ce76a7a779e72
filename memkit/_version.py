"""The version of memkit, in one place."""

__version__ = "0.1.0"
