"""The version, where every layer may read it (the package itself names modules of every layer)."""

__version__ = "0.1.0"
