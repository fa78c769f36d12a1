"""Reporting: what a person looks at while a run goes on."""

from lightning_rl.reporting.samples import SampleTable

__all__ = ["SampleTable"]
