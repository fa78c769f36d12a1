"""Reports, summaries and sample tables, during a run and afterwards."""

from lightning_rl.reporting.html_report import write_report
from lightning_rl.reporting.run_report import RunReport
from lightning_rl.reporting.sample_table import SampleTable
from lightning_rl.reporting.summary import RolloutSummary

__all__ = ["RolloutSummary", "RunReport", "SampleTable", "write_report"]
