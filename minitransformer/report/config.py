"""Settings of the report."""

from dataclasses import dataclass, field


@dataclass
class ReportConfig:
    """runs: run directories, or folders of them, which may be given without `runs=`; several are compared (empty: the
        newest run).

    out: the file to write (None: report.html in the run, comparison.html beside the first of several; in the working
        directory where that place is read-only).
    runs_dir: where the newest run is looked for.
    """

    runs: list[str] = field(default_factory=list)
    out: str | None = None
    runs_dir: str = "runs"
