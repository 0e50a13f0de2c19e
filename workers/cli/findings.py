"""What checks found, as a table."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from workers.preflight.finding import Finding

VERDICTS = {True: "yes", False: "NO", None: "-"}


def findings_table(findings: Iterable[Finding]) -> Table:
    """One row a finding; what failed stands out."""
    table = Table("check", "expected", box=None)
    table.add_column("seen", overflow="fold")
    table.add_column("ok")
    for finding in findings:
        verdict = Text(VERDICTS[finding.ok], style="bold red" if finding.ok is False else "")
        table.add_row(Text(finding.check), Text(finding.expected), Text(finding.seen), verdict)
    return table
