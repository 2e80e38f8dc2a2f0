"""Muon and AdamW against torch's own, and each parameter in one group."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from minitransformer import ModelConfig, Transformer
from minitransformer.training.config import AdamWConfig, GroupConfig, MuonConfig
from minitransformer.training.optimizers import Muon, by_name, check_resumable, make_optimizer, orthogonalize


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 16, 48), (2, 48, 16), (1, 144, 576), (2, 576, 144)])
def test_orthogonalize_brings_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_orthogonalize_keeps_the_directions():
    """U S V^T becomes U S' V^T: the result is diagonal in the bases of the matrix."""
    torch.manual_seed(0)
    matrix = torch.randn(3, 12, 20)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalize(matrix) @ v.mT
    assert (inner - inner.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() < 1e-4


def test_zero_gradients_stay_zero():
    assert orthogonalize(torch.zeros(2, 4, 6)).eq(0).all()


def test_muon_equals_torch():
    """torch's Muon runs its Newton-Schulz in bf16, hence the tolerance."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(x) for x in torch.randn(24, 40).expand(2, -1, -1).clone())
    mine = Muon([dict(params=[ours], matrix=True)], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    assert (ours - theirs).norm() < 0.02 * (ours - before).norm()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_stacked_matrices_move_as_if_each_were_a_parameter(activation):
    """Against Muon on the heads of queries, keys and values, a gate and an input apart; 2 of 4 heads have keys."""
    shape = dict(n_heads=4, n_kv_heads=2, activation=activation)
    model = Transformer(ModelConfig(vocab_size=20, d_model=16, n_layers=1, max_seq_len=8, **shape))
    joined = {name: p for name, p in model.blocks.named_parameters() if p.ndim == 2}
    rows = {"0.attention.qkv.weight": 4}  # d_head
    if activation == "swiglu":
        rows["0.feed_forward.input.weight"] = model.config.ff_width
    apart = {
        name: [torch.nn.Parameter(part.clone()) for part in p.detach().split(rows.get(name, len(p)))]
        for name, p in joined.items()
    }
    assert len(apart["0.attention.qkv.weight"]) == 8
    optimizer = make_optimizer(MuonConfig(lr=0.02, weight_decay=0.1), model)
    parts = [part for some in apart.values() for part in some]
    other = Muon([dict(params=parts, matrix=True)], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        for name, p in joined.items():
            p.grad = torch.randn_like(p)
            for part, grad in zip(apart[name], p.grad.split(len(apart[name][0])), strict=True):
                part.grad = grad
        optimizer.step()
        other.step()
    for name, p in joined.items():
        torch.testing.assert_close(p.detach(), torch.cat(apart[name]).detach(), atol=1e-6, rtol=1e-5)


def test_the_adamw_of_muon_equals_torch():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(x) for x in torch.randn(24, 40).expand(2, -1, -1).clone())
    settings = dict(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    mine, other = Muon([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(5):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig(weight_decay=0.3)])
def test_every_parameter_is_in_one_group(config, tie):
    model = Transformer(
        ModelConfig(
            vocab_size=20, d_model=16, n_layers=2, n_heads=2, bias=True, norm="layernorm", position="learned",
            tie_embeddings=tie,
        )
    )  # fmt: skip
    optimizer = make_optimizer(config, model)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (config.weight_decay if p.ndim == 2 else 0), names[id(p)]
            if isinstance(config, MuonConfig):
                assert group["matrix"] == (p.ndim == 2 and names[id(p)].startswith("blocks."))


def test_optimizer_state_survives_plain_saving(tmp_path):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=20, d_model=16, n_layers=1, n_heads=2, max_seq_len=8))
    optimizer = make_optimizer(MuonConfig(), model)
    for _ in range(2):
        model(torch.randint(20, (2, 8))).square().mean().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    again = make_optimizer(MuonConfig(), model)
    again.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    for p in model.parameters():
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, again.state[p][name]), name
            assert value.dtype == again.state[p][name].dtype


@pytest.mark.parametrize("base", [AdamWConfig(), MuonConfig(weight_decay=0.2)], ids=["adamw", "muon"])
@pytest.mark.parametrize("tie", [False, True])
def test_groups_by_pattern_hold_for_what_they_match_and_nothing_else(base, tie):
    model = Transformer(ModelConfig(vocab_size=20, d_model=16, n_layers=2, n_heads=2, tie_embeddings=tie, bias=True))
    groups = [
        GroupConfig("blocks.0.*.bias", lr=0.5),
        GroupConfig("blocks.*.bias", weight_decay=0.3),
        GroupConfig("embedding.weight", lr=0.25, weight_decay=0.0),
    ]
    plain, own = make_optimizer(base, model), make_optimizer(replace(base, groups=groups), model)

    def found(optimizer) -> dict:
        names = {id(p): name for name, p in model.named_parameters()}
        settings = [
            (names[id(p)], (g["lr"], g["weight_decay"], g["matrix"]))
            for g in optimizer.param_groups
            for p in g["params"]
        ]
        assert len(settings) == len(dict(settings)) == len(names)  # each in exactly one group, tied ones once
        return dict(settings)

    before, after = found(plain), found(own)
    for name, (lr, decay, matrix) in after.items():
        expected = before[name]
        if name.startswith("blocks.0.") and name.endswith(".bias"):
            expected = (0.5, *expected[1:])
        elif name.startswith("blocks.1.") and name.endswith(".bias"):
            expected = (expected[0], 0.3, expected[2])
        elif name == "embedding.weight":
            expected = (0.25, 0.0, expected[2])
        assert (lr, decay, matrix) == expected, name


def test_a_pattern_that_matches_nothing_is_named():
    model = Transformer(ModelConfig(vocab_size=20, d_model=16, n_layers=2, n_heads=2))
    with pytest.raises(
        ValueError, match=r"blocks\.\*\.nrom\.\* matches no parameter; there are embedding\.weight, blocks\.\*\."
    ):
        make_optimizer(AdamWConfig(groups=[GroupConfig("blocks.*.nrom.*", lr=1)]), model)
    with pytest.raises(ValueError, match="has no pattern"):
        GroupConfig(lr=1)
    with pytest.raises(ValueError, match="lr of a=-1"):
        GroupConfig("a", lr=-1)


def stepped(config, device: str = "cpu"):
    """A model and its optimizer after two steps, or on another device before any."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=20, d_model=16, n_layers=2, n_heads=2, max_seq_len=8)).to(device)
    optimizer = make_optimizer(config, model)
    if device == "cpu":
        for _ in range(2):
            model(torch.randint(20, (2, 8))).square().mean().backward()
            optimizer.step()
    return model, optimizer


def earlier(saved: dict) -> dict:
    """The state as checkpoints had it before they named parameters."""
    saved = deepcopy(saved)
    for group in saved["param_groups"]:
        del group["param_names"]
        group.pop("fused" if "ns_steps" in group else "", None)
    return saved


OTHER = dict(lr=0.3, betas=(0.5, 0.6), eps=1e-4)


@pytest.mark.parametrize("form", [by_name, earlier])
@pytest.mark.parametrize(("old", "new"), [
    (AdamWConfig(), AdamWConfig(**OTHER, weight_decay=0.7)),
    (MuonConfig(weight_decay=0.1), MuonConfig(**OTHER, weight_decay=0.7, adamw_lr=0.2, embedding_lr=0.4, momentum=0.5)),
], ids=["adamw", "muon"])  # fmt: skip
def test_a_loaded_state_has_the_moments_of_the_old_and_the_settings_of_the_new(old, new, form):
    model, optimizer = stepped(old)
    fresh = make_optimizer(new, model)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in fresh.param_groups]
    fresh.load_state_dict(form(optimizer.state_dict()))
    for group, before in zip(fresh.param_groups, settings, strict=True):
        assert {name: value for name, value in group.items() if name != "params"} == before
    for p in model.parameters():
        assert fresh.state[p].keys() == optimizer.state[p].keys()
        assert all(torch.equal(value, fresh.state[p][name]) for name, value in optimizer.state[p].items())


@pytest.mark.parametrize("new", [
    MuonConfig(weight_decay=0.1),  # the head leaves the group of the gains
    MuonConfig(groups=[GroupConfig("blocks.1.*", lr=0.5)]),
], ids=["decay", "groups"])  # fmt: skip
def test_a_state_finds_its_parameter_in_other_groups(new):
    model, optimizer = stepped(MuonConfig())
    fresh = make_optimizer(new, model)
    assert len(fresh.param_groups) != len(optimizer.param_groups)
    fresh.load_state_dict(by_name(optimizer.state_dict()))
    for p in model.parameters():
        assert all(torch.equal(value, fresh.state[p][name]) for name, value in optimizer.state[p].items())
    with pytest.raises(ValueError, match="of an earlier version"):
        check_resumable(fresh, earlier(optimizer.state_dict()))


@pytest.mark.parametrize("form", [by_name, earlier])
@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_a_loaded_state_lies_where_its_parameter_does(config, form):
    """`step` too, which torch leaves where a checkpoint was read if nothing says that a kernel needs it elsewhere."""
    _, optimizer = stepped(config)
    model, elsewhere = stepped(config, "meta")
    elsewhere.load_state_dict(form(optimizer.state_dict()))
    for p in model.parameters():
        assert {value.device.type for value in elsewhere.state[p].values()} == {"meta"}


def test_the_state_of_another_optimizer_is_refused():
    for old, new in ((AdamWConfig(), MuonConfig()), (MuonConfig(), AdamWConfig())):
        _, optimizer = stepped(old)
        with pytest.raises(ValueError, match=r"it was trained with optimizer=(adamw|muon), not (muon|adamw)"):
            check_resumable(stepped(new)[1], by_name(optimizer.state_dict()))


@pytest.mark.parametrize("eps", [0, 1e-50])
def test_an_eps_that_divides_by_nothing_is_refused(eps):
    with pytest.raises(ValueError, match=f"optimizer.eps={eps} "):
        AdamWConfig(eps=eps)
    # The least that is accepted: gradients of 0 change nothing.
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    for optimizer in (Muon([p], lr=1, eps=1e-30), torch.optim.AdamW([p], lr=1, eps=1e-30, weight_decay=0, fused=True)):
        optimizer.step()
        assert p.eq(1).all()
