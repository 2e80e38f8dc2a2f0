"""Learning rates as pure functions of the step."""

import math

from minitransformer.training.config import (
    ConstantConfig,
    CosineConfig,
    DecayConfig,
    InverseSqrtConfig,
    RangeConfig,
    ScheduleConfig,
    WSDConfig,
)


def rate(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """The factor on every learning rate at step 0 ... max_steps - 1.

    The first is above 0 and the peak is 1. The last is `min_ratio` where the schedule decays to an end, unless warm-up
    has not ended by then.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if isinstance(config, ConstantConfig):
        return warmup
    if isinstance(config, RangeConfig):
        return config.first_ratio ** ((max_steps - 1 - step) / max(1, max_steps - 1))
    assert isinstance(config, DecayConfig)
    peak = max(1, config.warmup_steps)  # steps until the one that reaches the peak, itself among them
    if isinstance(config, InverseSqrtConfig):
        left = min(1.0, math.sqrt(peak / (step + 1)))
        return warmup * max(config.min_ratio, left)
    longest = max_steps - peak
    length = min(longest, config.decay_fraction * max_steps) if isinstance(config, WSDConfig) else longest
    left = min(1.0, (max_steps - 1 - step) / length) if length > 0 else 1.0  # of the decay
    if isinstance(config, CosineConfig):
        left = 0.5 * (1 - math.cos(math.pi * left))
    return warmup * (config.min_ratio + (1 - config.min_ratio) * left)
