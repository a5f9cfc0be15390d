"""Trust regions that become smaller, for ``14_annealed.yml``."""

from stable_baselines3.common.callbacks import BaseCallback


class LinearTargetKL(BaseCallback):
    """``target_kl`` falls linearly over training, to 2% of what it was."""

    def _on_training_start(self) -> None:
        self.first = self.model.target_kl

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        remaining = 1.0 - self.model.num_timesteps / self.model._total_timesteps
        self.model.target_kl = self.first * max(0.02, remaining)
