"""Findings of the doctor, and their output."""

from lightning_rl.utils.finding import Finding


def fact(check: str, observed: str) -> Finding:
    """Return information without a problem."""
    return Finding(check=check, observed=observed, severity="fact")


def warning(check: str, observed: str, cure: str) -> Finding:
    """Return a problem that does not end a run."""
    return Finding(check=check, observed=observed, cure=cure, severity="warning")


def error(check: str, observed: str, cure: str) -> Finding:
    """Return a problem that ruins a run or prevents it."""
    return Finding(check=check, observed=observed, cure=cure, severity="error")


def paragraph(finding: Finding) -> str:
    """Format a finding next to the name of its check, with the fix on a separate line."""
    mark = "" if finding.severity == "fact" else f"{finding.severity.upper()}: "
    lines = f"{mark}{finding.observed}".splitlines() + ([f"  fix: {finding.cure}"] if finding.cure else [])
    return "\n".join(f"{'' if number else finding.check:<12}{line}" for number, line in enumerate(lines))
