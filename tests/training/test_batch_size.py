"""The finder of a batch size: it doubles until memory ends or nothing is gained."""

import io

import pytest
import torch
from rich.console import Console

from minitransformer.training import batch_size
from minitransformer.training.batch_size import find_batch_size
from tests.conftest import SMALL


class Stub(torch.nn.Module):
    """A module whose steps take `seconds(rows)` by a clock of its own, and run out of memory above `room` rows."""

    def __init__(self, seconds, room: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seconds, self.room, self.now, self.tried = seconds, room, 0.0, []
        self.tokenizer = type("", (), {"vocab_size": 10})
        self.config = type("", (), {"data": type("", (), {"batch_size": 24})})

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.1)

    def peak_memory(self):
        return 10**9

    def loss_sums(self, batch):
        rows = len(batch.tokens)
        if rows > self.room:
            raise torch.OutOfMemoryError
        self.tried.append(rows)
        self.now += self.seconds(rows)
        return self.weight * batch.step_targets, None


@pytest.mark.parametrize(("seconds", "room", "tried", "best"), [
    (lambda rows: 1.0, 20, [1, 2, 4, 8, 16], 16),  # a GPU far from full: only memory ends it
    (lambda rows: float(rows), 1000, [1, 2, 4], 1),  # no gain at all
    (lambda rows: max(rows, 8.0), 1000, [1, 2, 4, 8, 16, 32], 8),  # full at 8 rows
], ids=["memory", "flat", "full at 8"])  # fmt: skip
def test_it_stops_where_it_should_and_names_the_fewest_rows_that_are_fast(monkeypatch, seconds, room, tried, best):
    stub, out = Stub(seconds, room), io.StringIO()
    monkeypatch.setattr(batch_size.time, "perf_counter", lambda: stub.now)
    console = Console(file=out, width=100)
    assert find_batch_size(stub, torch.device("cpu"), "32-true", 16, console) == best
    assert list(dict.fromkeys(stub.tried)) == tried
    assert f"data.batch_size={best}" in out.getvalue()
    assert f"trainer.accumulate={-(-24 // best)}" in out.getvalue()
    assert ("does not fit" in out.getvalue()) == (room < 1000)


def test_a_row_that_does_not_fit_is_said():
    with pytest.raises(ValueError, match="not even one row of 16 tokens fits"):
        find_batch_size(Stub(None, 0), torch.device("cpu"), "32-true", 16, Console(file=io.StringIO()))


@pytest.mark.parametrize("settings", [[], ["trainer.precision=bf16-mixed", "trainer.gradient_checkpointing=full"]])
def test_the_command_trains_nothing(command, workdir, settings):
    small = [s for s in SMALL if not s.startswith(("trainer", "callbacks"))]
    result = command(
        "train", "debug=find_batch", "data=text", "data.files=[book.txt]", "tokenizer=byte", *small, *settings
    )
    assert result.code == 0, result.err
    assert "rows at a time are enough" in result.out
    assert not (workdir / "runs").exists()


def test_one_process_alone(command):
    result = command("train", "debug=find_batch", "trainer.devices=2")
    assert (result.code, result.out) == (1, "")
    assert "trainer.find_batch measures one process; set trainer.devices=1" in result.err
