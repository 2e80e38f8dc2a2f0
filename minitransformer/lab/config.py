"""Settings of the attention lab."""

from dataclasses import dataclass, field, fields

from minitransformer.model.checks import count
from minitransformer.words import VERBATIM


@dataclass
class LabConfig:
    """The whole config of the command.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`).
    prompt: the text that the model reads; its attention is shown.
    layer, head: which the page shows first.
    explain: so many likely next tokens at a place, and the one that came, get integrated gradients (0: none).
    explain_places: at so many of the last places (None: as many as take about half a minute).
    out: the page (None: lab.html beside the model; in the working directory where that place is read-only).
    serve: then serve the page on localhost and open a browser, where other prompts can be typed, until Ctrl-C.
    port: of the server (0: any that is free).
    example: only the textbook example, which needs no model.
    """

    checkpoint: str | None = None
    runs_dir: str = "runs"
    prompt: str = field(default="time flies like an arrow", metadata=VERBATIM)
    layer: int = 0
    head: int = 0
    explain: int = 3
    explain_places: int | None = None
    out: str | None = None
    serve: bool = False
    port: int = 8000
    example: bool = False

    def __post_init__(self) -> None:
        count("layer", self.layer, 0)
        count("head", self.head, 0)
        count("explain", self.explain, 0)
        if self.explain_places is not None:
            count("explain_places", self.explain_places)
        count("port", self.port, 0, 2**16 - 1)
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.checkpoint is not None and "runs_dir" in given:
            raise ValueError(f"runs_dir={self.runs_dir} is for the newest run; checkpoint={self.checkpoint} names one")
        if "port" in given and not self.serve:
            raise ValueError(f"port={self.port} is for serve=true")
        if "explain_places" in given and not self.explain:
            raise ValueError(f"explain_places={self.explain_places} cannot go with explain=0, which explains nothing")
        if self.example and (unused := sorted(given.keys() - {"example", "out", "serve", "port"})):
            raise ValueError(f"example=true needs no model and takes out, serve and port; not {', '.join(unused)}")
