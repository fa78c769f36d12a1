"""Environments and questions of other packages, to copy beside a script; each needs its package (docs/adapters.md)."""
