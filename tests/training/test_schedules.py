"""Learning rates, worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.training.config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    RangeConfig,
    WSDConfig,
)
from minitransformer.training.schedules import rate


def test_wsd_by_hand():
    config = WSDConfig(warmup_steps=2, min_ratio=0.1, decay_fraction=0.5)
    # 8 steps: up over two, flat, then four steps' worth of decay that ends at step 7.
    expected = [0.5, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert [rate(config, s, 8) for s in range(8)] == pytest.approx(expected)


def test_cosine_by_hand():
    config = CosineConfig(warmup_steps=1, min_ratio=0.0)
    assert [rate(config, s, 5) for s in range(5)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])
    config = CosineConfig(warmup_steps=2, min_ratio=0.5)
    assert [rate(config, s, 6) for s in range(6)] == pytest.approx([0.5, 1, 0.9267767, 0.75, 0.5732233, 0.5])


def test_the_others_by_hand():
    constant = ConstantConfig(warmup_steps=4)
    assert [rate(constant, s, 6) for s in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    linear = LinearConfig(warmup_steps=2, min_ratio=0.2)
    assert [rate(linear, s, 6) for s in range(6)] == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    # Vaswani et al. 2017: step^-0.5 after step * warmup^-1.5, here over its peak of warmup^-0.5.
    inverse = InverseSqrtConfig(warmup_steps=4, min_ratio=0.3)
    expected = [min((s + 1) ** -0.5, (s + 1) * 4**-1.5) / 4**-0.5 for s in range(60)]
    assert [rate(inverse, s, 60) for s in range(40)] == pytest.approx(expected[:40])
    assert rate(inverse, 59, 60) == 0.3  # 2 / sqrt(60) is below
    rising = RangeConfig(first_ratio=1e-4)
    assert [rate(rising, s, 5) for s in range(5)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])


CONFIGS = st.one_of(
    st.builds(LinearConfig, warmup_steps=st.integers(0, 50), min_ratio=st.floats(0, 1)),
    st.builds(CosineConfig, warmup_steps=st.integers(0, 50), min_ratio=st.floats(0, 1)),
    st.builds(WSDConfig, warmup_steps=st.integers(0, 50), min_ratio=st.floats(0, 1), decay_fraction=st.floats(0, 1)),
)


@given(CONFIGS, st.integers(1, 40))
def test_any_setting_is_defined(config, max_steps):
    rates = [rate(config, s, max_steps) for s in range(max_steps)]
    assert all(0 <= r <= 1 for r in rates)
    assert rates[0] > 0
    if config.warmup_steps < max_steps:
        assert max(rates) == pytest.approx(1)
        constant = max_steps == 1 or (isinstance(config, WSDConfig) and config.decay_fraction == 0)
        assert rates[-1] == pytest.approx(1 if constant else config.min_ratio)
    else:
        assert rates == pytest.approx([(s + 1) / config.warmup_steps for s in range(max_steps)])


@given(
    st.one_of(
        st.builds(ConstantConfig, warmup_steps=st.integers(0, 50)),
        st.builds(InverseSqrtConfig, warmup_steps=st.integers(0, 50), min_ratio=st.floats(0, 1)),
        st.builds(RangeConfig, first_ratio=st.floats(1e-6, 0.9)),
    ),
    st.integers(1, 80),
)
def test_schedules_without_an_end_are_defined_too(config, max_steps):
    rates = [rate(config, s, max_steps) for s in range(max_steps)]
    assert all(0 < r <= 1 for r in rates)
    if config.warmup_steps <= max_steps:
        assert max(rates) == pytest.approx(1)


def test_a_longer_run_is_the_same_until_it_decays():
    config = WSDConfig(warmup_steps=3, decay_fraction=0.2)
    assert [rate(config, s, 50) for s in range(40)] == [rate(config, s, 100) for s in range(40)]
