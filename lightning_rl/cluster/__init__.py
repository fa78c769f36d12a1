"""Ranks and vLLM servers on a Ray cluster; only :mod:`lightning_rl.cli.ray` imports it."""
