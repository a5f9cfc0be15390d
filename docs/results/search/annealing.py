from stable_baselines3.common.callbacks import BaseCallback


class LinearTargetKL(BaseCallback):
    def _on_training_start(self):
        self.first = self.model.target_kl

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        left = 1 - self.model.num_timesteps / self.model._total_timesteps
        self.model.target_kl = self.first * max(0.02, left)
