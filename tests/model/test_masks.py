"""Masks by hand, and the fast ways to compute them against the plain one."""

import pytest
import torch

from minitransformer.model.attention import attend
from minitransformer.model.masks import (
    AttentionMask,
    causal,
    documents,
    first,
    fixed,
    prefix,
    random_blocks,
    strided,
    window,
)
from tests.model.models import PACKED, make, with_gradients


def rows(mask, n: int) -> list[str]:
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    return ["".join("x" if seen else "." for seen in row) for row in mask(q, k).expand(n, n).tolist()]


def test_masks_by_hand():
    assert rows(causal, 3) == ["x..", "xx.", "xxx"]
    assert rows(window(2), 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(first(1), 3) == ["x..", "x..", "x.."]
    assert rows(strided(2), 6) == ["x.....", "xx....", "xxx...", ".xxx..", "x.xxx.", ".x.xxx"]
    assert rows(fixed(3, 1), 7) == ["x......", "xx.....", "xxx....", "..xx...", "..xxx..", "..xxxx.", "..x..xx"]
    assert rows(prefix(2) | causal, 4) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows(window(2) | first(1), 4) == ["x...", "xx..", "xxx.", "x.xx"]
    assert rows(causal & window(1), 2) == ["x.", ".x"]


def test_reach_is_known_through_composition():
    assert (window(3) | window(5)).reach == 5
    assert (window(3) & causal).reach == 3
    assert (window(3) | first(1)).reach is None


def test_random_blocks_are_earlier_ones_and_the_same_each_time():
    table = torch.tensor([[c == "x" for c in row] for row in rows(random_blocks(4, 2), 64)])
    assert not table.triu(1).any()
    blocks = table.view(16, 4, 16, 4).any(dim=(1, 3)).sum(-1)
    assert blocks[1:].min() >= 1
    assert blocks.max() <= 2
    assert rows(random_blocks(4, 2), 32) == [row[:32] for row in rows(random_blocks(4, 2), 64)[:32]]
    assert rows(random_blocks(4, 2, seed=1), 64) != rows(random_blocks(4, 2), 64)


def test_documents_are_counted():
    assert documents(torch.tensor([[0, 1, 0, 0, 1, -1]])).tolist() == [[1, 1, 2, 3, 3, -1]]
    assert documents(torch.tensor([[-1, 5, 6, 0, 1]])).tolist() == [[-1, 0, 0, 1, 1]]


@pytest.mark.parametrize("length", [32, 37, 64, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_bands_equal_the_reference(length, packed):
    """Output and gradients, for whole rows and for packed ones with padding."""
    torch.manual_seed(0)
    positions = torch.arange(length)[None].repeat(2, 1)
    if packed:
        positions[0, 11:] = torch.arange(length - 11)
        positions[1, 20:] = torch.arange(length - 20)
        positions[1, -5:] = -1
    attention_mask = AttentionMask(positions, length, mask=window(8))
    assert attention_mask.worth_banding
    qkv = torch.randn(3, 2, 4, length, 16)
    results = [with_gradients(kernel, attention_mask, qkv) for kernel in ("reference", "sdpa")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_bands_and_slices_are_really_used(monkeypatch):
    """The fast ways are taken where they are meant to be: no mask of T x T is ever made."""
    monkeypatch.setattr(AttentionMask, "dense", property(lambda self: pytest.fail("a T x T mask was made")))
    q = torch.randn(2, 1, 512, 8)
    long = torch.arange(512).repeat(2, 1)
    split = long % 128
    for positions in (long, split):
        for mask in (causal, window(64)):
            assert attend(q, q, q, AttentionMask(positions, 512, mask=mask))[0].shape == q.shape
    attend(q, q, q, AttentionMask(split, 512, mask=window(200)))  # documents shorter than the window


def test_a_rolling_cache_stays_as_small_as_its_window():
    model = make("alibi", pattern=["window"], window=8, max_seq_len=32)
    tokens = torch.randint(50, (2, 200))
    cache, full = model.new_cache(2, 200), make("alibi", max_seq_len=32).new_cache(2, 200)
    before = cache.nbytes
    with torch.no_grad():
        logits = torch.cat(
            [model(part, cache=cache) for part in tokens.split([30, 1, 1, 50, *[1] * 118], dim=1)], dim=1
        )
        torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)
    assert cache.nbytes == before < full.nbytes / 10
    assert {b.data.shape[2] for b in cache.keys} == {8}


def test_prefix_tokens_see_each_other():
    model = make("rotary")
    tokens = torch.randint(50, (2, 10))
    lengths = torch.tensor([[4], [7]])
    logits, weights = model(tokens, prefix_lengths=lengths, return_attention=True)
    seen = weights[0][:, 0] > 0
    for row, n in enumerate((4, 7)):
        expected = torch.ones(10, 10).tril().bool()
        expected[:, :n] = True
        assert torch.equal(seen[row], expected)
    torch.testing.assert_close(logits[:1], model(tokens[:1], prefix_lengths=lengths[:1]), atol=1e-5, rtol=1e-4)
    cache = model.new_cache(2)
    parts = [model(tokens[:, :8], cache=cache, prefix_lengths=lengths), model(tokens[:, 8:], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="read the whole prefix at once"):
        model(tokens[:, :1], cache=cache, prefix_lengths=lengths)
    with pytest.raises(ValueError, match="causal only"):
        make("rotary", kind="elu")(tokens, prefix_lengths=lengths)


def test_a_packed_prefix_stays_in_its_document():
    model, tokens = make("rotary"), torch.randint(50, (2, 12))
    lengths = torch.tensor([[3] * 5 + [2] * 3 + [1] * 4, [6] * 12])
    packed = model(tokens, positions=PACKED, prefix_lengths=lengths)
    for row, start, end in ((0, 0, 5), (0, 5, 8), (0, 8, 10), (1, 0, 12)):
        alone = model(tokens[row : row + 1, start:end], prefix_lengths=lengths[row : row + 1, start : start + 1])
        torch.testing.assert_close(packed[row, start:end], alone[0], atol=1e-4, rtol=1e-4)
