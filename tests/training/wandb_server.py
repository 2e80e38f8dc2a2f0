"""As much of a W&B server as a client needs: it keeps the history of runs, in files of lines with offsets."""

import gzip
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """runs: id -> file name -> line number -> line, as clients sent them; `close` makes it unreachable.

    knows_key: else it answers with 401.
    """

    daemon_threads = True
    knows_key = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        self.exits: dict[str, int] = {}
        self.artifacts: list[dict] = []
        self.seen: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, run: str) -> list[dict]:
        lines = self.runs[run]["wandb-history.jsonl"]
        return [json.loads(lines[number]) for number in sorted(lines)]

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, operation: str, variables: dict) -> dict:
        if operation == "UpsertBucket":
            run, project = variables["name"], {"name": "p", "entity": {"name": "me"}}
            bucket = {"id": run, "name": run, "displayName": run, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "bucket": self.resume_status(variables["name"])}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":  # as if the server had its files already
            self.artifacts.append(variables["input"])
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "ArtifactType":  # no artifact of that name yet
            return {"project": None}
        if operation == "Viewer":
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        return {}

    def handle_error(self, *_) -> None:
        """A client may hang up when it likes."""

    def resume_status(self, run: str) -> dict | None:
        if run not in self.runs:
            return None
        lines = {name: [lines[i] for i in sorted(lines)] for name, lines in self.runs[run].items()}
        history, events = lines.get("wandb-history.jsonl", []), lines.get("wandb-events.jsonl", [])
        return {
            "name": run, "historyLineCount": len(history), "eventsLineCount": len(events), "logLineCount": 0,
            "historyTail": json.dumps(history[-1:]), "eventsTail": json.dumps(events[-1:]),
            "summaryMetrics": lines.get("wandb-summary.json", ["{}"])[-1], "config": "{}", "tags": [],
            "wandbConfig": '{"t": 1}',
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_) -> None:
        """Says nothing."""

    def body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def reply(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply({})

    def do_PUT(self) -> None:
        self.body()
        self.reply({})

    def do_POST(self) -> None:
        body = self.body()
        if not self.server.knows_key:
            self.reply({"errors": [{"message": "user is not logged in"}]}, 401)
        elif self.path == "/graphql":
            request = json.loads(body)
            operation = request.get("operationName") or re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            self.server.seen.append(operation)
            self.reply({"data": self.server.answer(operation, request.get("variables", {}))})
        elif self.path.endswith("/file_stream"):
            sent, run = json.loads(body), self.path.split("/")[-2]
            for name, part in sent.get("files", {}).items():
                for number, line in enumerate(part["content"], part["offset"]):
                    self.server.runs[run][name][number] = line
            if sent.get("complete"):
                self.server.exits[run] = sent["exitcode"]
            self.reply({"exitcode": None, "limits": {}})
        else:
            self.reply({})
