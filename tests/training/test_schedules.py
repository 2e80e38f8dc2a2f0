"""Learning rates, worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.training.config import CosineConfig, WSDConfig
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


CONFIGS = st.one_of(
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


def test_a_longer_run_is_the_same_until_it_decays():
    config = WSDConfig(warmup_steps=3, decay_fraction=0.2)
    assert [rate(config, s, 50) for s in range(40)] == [rate(config, s, 100) for s in range(40)]
