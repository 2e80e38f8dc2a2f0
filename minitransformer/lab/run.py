"""What the command does: write the page, say where, and serve it if asked."""

import contextlib
import threading
import webbrowser
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rich.console import Console
from rich.progress import track

from minitransformer.lab.config import LabConfig
from minitransformer.lab.page import example, exhibit, page
from minitransformer.run.directory import write_page
from minitransformer.run.models import load
from minitransformer.run.names import latest_run


def run(config: LabConfig) -> None:
    """Write the page, and serve it.

    Raises:
        ValueError: the checkpoint, the prompt or a setting is wrong.
    """
    if config.example:
        beside, exhibits = Path(), lambda prompt: [example()]
    else:
        path = latest_run(Path(config.runs_dir)) if config.checkpoint is None else Path(config.checkpoint)
        model, tokenizer = load(path)
        beside = path if path.is_dir() else path.parent

        def exhibits(prompt: str) -> list[dict]:
            one = exhibit(
                model, tokenizer, prompt, str(path), config.layer, config.head, config.explain, config.explain_places,
                track=progress,
            )  # fmt: skip
            return [one, example()]

    shown = exhibits(config.prompt)
    out = write_page(page(shown), config.out, beside / "lab.html")
    print(f"{out}: {len(shown[0]['tokens'])} tokens, {out.stat().st_size / 2**20:.1f} MB; open it in a browser")
    if config.serve:

        def answer(prompt: str) -> str:
            try:
                return page(exhibits(prompt), served=not config.example)
            except ValueError as error:
                return page(shown, served=True, error=str(error))

        serve(make_server(config.port, config.prompt, answer))


def progress(places: range) -> Iterable[int]:
    """A bar while the places are gone through, where there is a terminal to draw it on."""
    terminal = Console(stderr=True)
    return track(
        places, "integrated gradients", console=terminal, transient=True, disable=not (places and terminal.is_terminal)
    )


def serve(server: ThreadingHTTPServer) -> None:
    """Open a browser on the server, and answer until Ctrl-C."""
    with server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://localhost:{server.server_port}/"
        print(f"{address} shows it, and other prompts; Ctrl-C ends", flush=True)
        webbrowser.open(address)
        server.serve_forever()


def make_server(port: int, first: str, make: Callable[[str], str]) -> ThreadingHTTPServer:
    """A server on localhost whose / is `make(first)`, and /?prompt=... the page of another prompt.

    Raises:
        ValueError: the port is taken.
    """
    turn = threading.Lock()  # one prompt at a time: the model has hooks while it is traced

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path != "/":
                return self.send_error(404)
            with turn:
                body = make(parse_qs(url.query, keep_blank_values=True).get("prompt", [first])[0]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ValueError(f"port={port} cannot be opened ({error.strerror}); port=0 takes one that is free") from None
