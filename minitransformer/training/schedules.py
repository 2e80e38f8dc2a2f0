"""Learning rates as pure functions of the step."""

import math

from minitransformer.training.config import CosineConfig, ScheduleConfig, WSDConfig


def rate(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """The factor on every learning rate at step 0 ... max_steps - 1.

    The first is above 0 and the last is `min_ratio`, unless warm-up has not ended by then.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if isinstance(config, WSDConfig):
        length = config.decay_fraction * max_steps
        left = min(1.0, (max_steps - 1 - step) / length) if length else 1.0
    else:
        assert isinstance(config, CosineConfig)
        length = max_steps - 1 - config.warmup_steps
        done = min(1.0, max(0.0, (step - config.warmup_steps) / length)) if length > 0 else 0.0
        left = 0.5 * (1 + math.cos(math.pi * done))
    return warmup * (config.min_ratio + (1 - config.min_ratio) * max(0.0, left))
