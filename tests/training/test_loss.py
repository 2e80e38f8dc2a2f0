"""The chunked loss is the plain one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minitransformer.data.packing import IGNORE, Documents, TokenStream, fill, pack
from minitransformer.data.rows import make_batch
from minitransformer.model.config import BIASED_POSITIONS, POSITIONS
from minitransformer.training import loss
from minitransformer.training.loss import head_cross_entropy
from tests.model.models import make


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.05)])
def test_loss_and_gradients_equal_torch(chunk, softcap, smoothing, z_loss, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", chunk)
    monkeypatch.setattr(loss, "LEAST_ROWS", 1)
    torch.manual_seed(0)
    x, w = torch.randn(23, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    targets = torch.randint(30, (23,))
    targets[::4] = IGNORE
    results = []
    for fused in (False, True):
        x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        if fused:
            value, nats = head_cross_entropy(x_, w_, targets, softcap, smoothing, z_loss)
        else:
            logits = x_ @ w_.T
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            value = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            value = value + z_loss * logits[targets != IGNORE].logsumexp(-1).square().sum()
            nats = F.cross_entropy(logits, targets, reduction="sum")
        (3 * value).backward()
        results.append((value.detach(), nats.detach(), x_.grad, w_.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_without_gradients_and_with_frozen_parts():
    x, w, targets = torch.randn(9, 4), torch.randn(7, 4), torch.randint(7, (9,))
    expected = F.cross_entropy(x @ w.T, targets, reduction="sum")
    torch.testing.assert_close(head_cross_entropy(x, w, targets)[1], expected)
    w.requires_grad_()
    head_cross_entropy(x, w, targets)[0].backward()
    assert x.grad is None
    assert w.grad is not None


def test_autocast_multiplies_in_bf16_and_sums_in_fp32():
    torch.manual_seed(0)
    x, w, targets = torch.randn(64, 16), torch.randn(50, 16, requires_grad=True), torch.randint(50, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        value, _ = head_cross_entropy(x, w, targets)
    value.backward()
    assert value.dtype == w.grad.dtype == torch.float32
    logits = (x.bfloat16() @ w.bfloat16().T).float()
    torch.testing.assert_close(value, F.cross_entropy(logits, targets, reduction="sum"), rtol=1e-5, atol=1e-3)
    assert value != F.cross_entropy(x @ w.T, targets, reduction="sum")


def test_all_places_ignored_is_zero():
    x = torch.randn(5, 4, requires_grad=True)
    value, _ = head_cross_entropy(x, torch.randn(7, 4), torch.full((5,), IGNORE))
    value.backward()
    assert value == 0
    assert x.grad.eq(0).all()


@pytest.mark.parametrize("kind", ["softmax", "elu", "performer"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("packing", ["best_fit", "sequential"])
def test_a_packed_batch_has_the_loss_of_its_documents_alone(position, kind, packing):
    """The sum over all rows is the sum over documents read one by one, so their mean is the token-weighted one."""
    if kind != "softmax" and position in BIASED_POSITIONS:
        with pytest.raises(ValueError, match=f"kind={kind} has no scores for model.position={position}"):
            make(position, kind=kind)
        return
    model = make(position, kind=kind).double()
    documents = [[*range(1 + 3 * d, 1 + 3 * d + n)] for d, n in enumerate([5, 11, 0, 3, 14, 1, 8])]
    stream = np.array([t for d in documents for t in [0, *d]] + [0])
    rows = pack(Documents.of([len(d) for d in documents]), 16, packing)
    batch = make_batch(fill(TokenStream(stream, 0, 0), rows, np.arange(len(rows)), 16))

    def mean_loss(tokens, positions, targets):
        x, _ = model.hidden_states(tokens, positions)
        return head_cross_entropy(x.flatten(0, 1), model.head.weight, targets.flatten())[1].item()

    packed = mean_loss(*batch[:3]) / batch.step_targets
    alone = sum(
        mean_loss(torch.tensor([[0, *d]]), torch.arange(len(d) + 1)[None], torch.tensor([[*d, 0]])) for d in documents
    )
    assert packed == pytest.approx(alone / batch.step_targets, abs=1e-6)
