"""How many updates are due: the ratio of replay samples to environment steps, held exactly."""

from __future__ import annotations

from fractions import Fraction

from qfleet.config import Config


class Limiter:
    """Holds `replay.samples_per_step`: after S steps, floor((S - min_steps) * samples_per_step / batch_size) updates.

    Counting starts at `min_steps`, not at 0, so the first updates come at the same pace as all later ones instead of
    in a burst that overfits the few rows there are. The ratio is kept as a fraction: no rounding, and a pure
    function of (steps, updates), so a resumed run has nothing to restore.
    """

    def __init__(self, config: Config, learners: int = 1) -> None:
        """Steps are those of all learners; every one of them makes every update, with a batch of its own."""
        self.min_steps = config.first_update
        self._ratio = Fraction(str(config.replay.samples_per_step)) / (config.learner.batch_size * learners)

    def updates_due(self, steps: int, updates: int) -> int:
        """Updates to make now, when `steps` rows may be sampled and `updates` were made."""
        if steps < self.min_steps:
            return 0
        total = (steps - self.min_steps) * self._ratio.numerator // self._ratio.denominator
        return max(0, total - updates)
