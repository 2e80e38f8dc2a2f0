"""Every encoding x mask x head layout x kernel, read in every way, gives the same logits, or is refused by name."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from minitransformer.model.config import KERNELS, KINDS, POSITIONS
from tests.model.models import PACKED, make, patterned

HEADS = [
    dict(n_heads=4), dict(n_heads=4, n_kv_heads=2, qk_norm=True, qk_gain=True), dict(n_heads=3, n_kv_heads=1, d_head=12)
]  # fmt: skip
SMALL = dict(window=3, global_tokens=1, block=2, random_blocks=1, stride=3, summary=1)
MASKS = {
    "full": dict(pattern=["full"]),
    "window": patterned("window", **SMALL),
    "window, full": patterned("window", "full", **SMALL),
    "bigbird": patterned("bigbird", **SMALL),
    "strided": patterned("strided", **SMALL),
    "fixed": patterned("fixed", **SMALL),
    "soft cap": dict(softcap=2.0),
    **{kind: dict(kind=kind) for kind in KINDS if kind != "softmax"},
}
TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
TEXT = PACKED >= 0


def refusal(position: str, mask: str, kernel: str) -> list[str]:
    """What a combination's refusal names; nothing where it must work. Written from what each kernel can do."""
    if position == "shaw" and kernel in ("sdpa", "flex"):
        return [f"kernel={kernel}", "position=shaw"]
    if mask in KINDS:
        if position in ("alibi", "t5", "shaw", "transformer_xl"):
            return [f"kind={mask}", f"position={position}"]
        return [f"kind={mask}", f"kernel={kernel}"] if kernel != "auto" else []
    if mask == "soft cap" and kernel == "sdpa":
        return ["kernel=sdpa", "softcap"]
    return []


def written_out(mask: str) -> str:
    """The kernel that is the truth; linear attention has no other than its own."""
    return "auto" if mask in KINDS else "reference"


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def read_every_way(model, expected: torch.Tensor, packed: torch.Tensor) -> None:
    """Whole, packed, in chunks, token by token, padded on the left: against the logits of the reference."""
    flex = model.config.attention.kernel == "flex"
    same(model(TOKENS), expected)
    same(model(TOKENS, positions=PACKED)[TEXT], packed[TEXT])
    if flex and model.config.n_kv_heads is not None:
        return  # flex is slow without a compiler: one head layout is read in every way
    for chunks in [[5, 7]] if flex else [[12], [5, 7], [1] * 12]:
        cache = model.new_cache(2)
        same(torch.cat([model(part, cache=cache) for part in TOKENS.split(chunks, dim=1)], dim=1), expected)
        assert cache.length == 12
        cache = model.new_cache(2, 12)
        parts = zip(TOKENS.split(chunks, dim=1), PACKED.split(chunks, dim=1), strict=True)
        same(torch.cat([model(part, positions=at, cache=cache) for part, at in parts], dim=1)[TEXT], packed[TEXT])
    # A shorter prompt, padded on the left, then more tokens.
    positions = torch.stack((torch.arange(7), torch.arange(7) - 3)).clamp(min=-1)
    rows = torch.stack((TOKENS[0, :7], torch.cat((TOKENS[1, 9:], TOKENS[1, :4]))))
    cache, more = model.new_cache(2), 1 if flex else 5
    logits = [model(rows, positions=positions, cache=cache)]
    logits += [model(torch.stack((TOKENS[0, 7 + i], TOKENS[1, 4 + i]))[:, None], cache=cache) for i in range(more)]
    logits = torch.cat(logits, dim=1)
    same(logits[0], expected[0, : 7 + more])
    same(logits[1, 3:], expected[1, : 4 + more])


CELLS = list(itertools.product(POSITIONS, MASKS, range(len(HEADS)), KERNELS))


def test_the_matrix_is_whole():
    """README's count: each cell below agrees or is refused, none is skipped."""
    refused = sum(bool(refusal(position, mask, kernel)) for position, mask, _, kernel in CELLS)
    assert (len(CELLS), refused) == (864, 231)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_cell_agrees_or_is_refused(position, mask):
    for heads, kernel in itertools.product(HEADS, KERNELS):
        settings = MASKS[mask] | heads
        if words := refusal(position, mask, kernel):
            with pytest.raises(ValueError, match=".*".join(words)) as error:
                make(position, kernel=kernel, **settings)
            assert "choose" in str(error.value) or "use " in str(error.value)
            continue
        model = make(position, kernel=kernel, **settings)
        reference = make(position, kernel=written_out(mask), **settings)
        with torch.no_grad():
            expected, packed = reference(TOKENS), reference(TOKENS, positions=PACKED)
            read_every_way(model, expected, packed)
            if kernel == written_out(mask):
                for row, start, end in ((0, 0, 5), (0, 5, 8), (0, 8, 10), (1, 0, 12)):  # each document alone
                    same(packed[row, start:end], model(TOKENS[row : row + 1, start:end])[0])
            logits, weights = model(TOKENS, positions=PACKED, return_attention=True)
        same(logits[TEXT], packed[TEXT])
        for layer in weights:
            torch.testing.assert_close(layer.sum(-1), TEXT.float()[:, None].expand(-1, layer.shape[1], -1))
            assert layer.triu(1).eq(0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_agree(position, mask):
    if refusal(position, mask, "auto"):
        return  # asserted above
    gradients = []
    for kernel, checkpointing in [
        (written_out(mask), "none"),
        *(("auto", how) for how in ("none", "full", "selective")),
    ]:
        model = make(position, kernel=kernel, qk_norm=True, **MASKS[mask]).train()
        model.checkpoint_gradients(checkpointing)
        F.cross_entropy(model(TOKENS, positions=PACKED)[TEXT], TOKENS[TEXT]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert gradient is not None, name
            torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-3)
