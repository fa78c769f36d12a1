"""Version of the library; equal to the one in `pyproject.toml`."""

__version__ = "0.2.0"
