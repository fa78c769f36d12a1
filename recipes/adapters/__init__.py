"""Environments and questions of other packages, to copy beside a script; docs/environments.md describes each."""
