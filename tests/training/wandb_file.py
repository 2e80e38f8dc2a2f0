"""What an offline run of W&B wrote, read back through its protocol buffers (the file is a LevelDB log)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records that are whole: W&B's own process may still be writing the next one."""
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    at, whole = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # a block ends in zeros where no header fits
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])  # kind: whole, first, middle, last
        end = at + HEADER + length
        if end > len(data):
            return
        whole += data[at + HEADER : end]
        at = end
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


class OfflineRun:
    """run (name, project and so on), id, config, history (step -> metrics), artifacts, code (of exit), stats (how many
    system metrics), and the rows of the table `samples`."""

    def __init__(self, folder: Path):
        (path,) = folder.glob("*.wandb")
        found = list(records(path))
        run = next((r.run for r in found if r.WhichOneof("record_type") == "run"), wandb_internal_pb2.RunRecord())
        self.run, self.id, self.config = run, run.run_id, {u.key: json.loads(u.value_json) for u in run.config.update}
        self.history: dict[int, dict] = {}
        for record in found:
            if record.WhichOneof("record_type") == "history":
                row = values(record.history.item)
                assert row["_step"] not in self.history, f"step {row['_step']} twice"
                self.history[row["_step"]] = row
        self.artifacts = [r.artifact for r in found if r.WhichOneof("record_type") == "artifact"]
        self.code = next((r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"), None)
        self.stats = sum(r.WhichOneof("record_type") == "stats" for r in found)
        self.files = folder / "files"

    def samples(self) -> list[list]:
        tables = [row["samples"]["path"] for _, row in sorted(self.history.items()) if "samples" in row]
        return [line for table in tables for line in json.loads((self.files / table).read_text())["data"]]


def values(items) -> dict:
    """{"a": 1, "b": {"c": 2}} of items whose keys are paths."""
    found: dict = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        place = found
        for key in path:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found
