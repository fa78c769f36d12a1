"""What the checks of the doctor say, and how it is printed."""

from lightning_rl.finding import Finding


def fact(check: str, observed: str) -> Finding:
    """Something good to know."""
    return Finding(check=check, observed=observed, severity="fact")


def warning(check: str, observed: str, cure: str) -> Finding:
    """Something that a run survives."""
    return Finding(check=check, observed=observed, cure=cure, severity="warning")


def error(check: str, observed: str, cure: str) -> Finding:
    """Something that spoils a run or keeps it from beginning."""
    return Finding(check=check, observed=observed, cure=cure, severity="error")


def paragraph(finding: Finding) -> str:
    """A finding beside the name of its check, with its fix on a line of its own."""
    mark = "" if finding.severity == "fact" else f"{finding.severity.upper()}: "
    lines = f"{mark}{finding.observed}".splitlines() + ([f"  fix: {finding.cure}"] if finding.cure else [])
    return "\n".join(f"{'' if number else finding.check:<12}{line}" for number, line in enumerate(lines))
