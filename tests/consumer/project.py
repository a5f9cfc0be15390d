"""What a user of sb3_uatrpo might write. It runs, and `mypy --strict` accepts it."""

from pathlib import Path

import gymnasium as gym
import numpy as np
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import assert_type

from sb3_uatrpo import (
    RECOMMENDED_DISCRETE,
    UATRPO,
    CnnPolicy,
    MatchedTRPO,
    MlpPolicy,
    MultiInputPolicy,
    __version__,
    study,
)
from sb3_uatrpo.maskable import MaskableMatchedTRPO, MaskableUATRPO
from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import plan
from sb3_uatrpo.study.run import run_study
from sb3_uatrpo.zoo import register


class Careful(UATRPO):
    """A user's own subclass."""


class StopWhenUnknown(BaseCallback):
    """Ends the training when proposed steps are far larger than estimated."""

    def _on_step(self) -> bool:
        return float(self.logger.name_to_value["train/kl_ratio"]) < 100.0


def train(folder: Path) -> UATRPO:
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0), norm_reward=False)
    model = UATRPO(
        MlpPolicy,
        env,
        **RECOMMENDED_DISCRETE(gamma=0.9, policy_kwargs={"net_arch": [16]}),
        learning_rate=lambda remaining: 1e-3 * remaining,
        n_steps=100,
        batch_size=50,
        n_projections=20,
        sample_unit="step",
        projection_solver="nystrom",
        seed=0,
        device="cpu",
    )
    callbacks = CallbackList([StopWhenUnknown(), CheckpointCallback(100, str(folder))])
    assert_type(model.learn(400, callback=callbacks), UATRPO)
    assert_type(model.learn(200, callback=lambda in_learn, in_module: True), UATRPO)
    assert_type(model.trust_region_delta, float)
    assert_type(model.sketch.n_bytes, int)
    model.save(str(folder / "small"), exclude=["sketch"])
    model.save(folder / "model")

    loaded = UATRPO.load(folder / "model", env=env, device="cpu")
    assert_type(loaded, UATRPO)
    assert_type(Careful.load(folder / "model", env=env, device="cpu").learn(200), Careful)
    actions, _ = loaded.predict(env.observation_space.sample(), deterministic=True)
    assert actions.shape == (1,)
    return loaded


def baseline() -> MatchedTRPO:
    model = MatchedTRPO("MlpPolicy", "CartPole-v1", n_steps=100, target_kl=0.02, device="cpu")
    return assert_type(model.learn(100), MatchedTRPO)


def masked(folder: Path) -> MaskableUATRPO:
    env = ActionMasker(gym.make("CartPole-v1"), lambda env: np.array([True, False]))
    model = MaskableUATRPO("MlpPolicy", env, **RECOMMENDED_DISCRETE, n_projections=20, device="cpu")
    callback = MaskableEvalCallback(env, eval_freq=500, n_eval_episodes=1, warn=False)
    assert_type(model.learn(1000, callback=callback, use_masking=True), MaskableUATRPO)
    action, _ = model.predict(np.zeros(4, np.float32), action_masks=np.array([False, True]))
    assert action == 1
    # annotated with MaskablePPO by sb3-contrib, and with Stable-Baselines3's policies here
    evaluate_policy(model, env, n_eval_episodes=1, warn=False)  # type: ignore[arg-type]
    control = MaskableMatchedTRPO(MaskableActorCriticPolicy, env, target_kl=0.02, device="cpu")  # type: ignore[arg-type]
    assert_type(control.learn(1000), MaskableMatchedTRPO)
    model.save(folder / "masked")
    return assert_type(MaskableUATRPO.load(folder / "masked", env=env, device="cpu"), MaskableUATRPO)


def make_studies(folder: Path) -> None:
    runs = assert_type(plan(["uatrpo"], ["Pendulum-v1"], seeds=[0], n_timesteps=400, eval_freq=0), list[study.Run])
    failed = assert_type(run_study(runs, folder), list[tuple[study.Run, Path]])
    tables = assert_type(study.read_study(folder), study.Study)
    estimate = assert_type(statistics.bootstrap_cvar(list(tables.episodes["return"]), kappa=0.5), statistics.Estimate)
    print(len(failed), len(tables.runs), estimate.value)


if __name__ == "__main__":
    register()
    print(__version__, [policy.__name__ for policy in (MlpPolicy, CnnPolicy, MultiInputPolicy)])
    here = Path("consumer")
    here.mkdir()
    print(train(here).num_timesteps, baseline().num_timesteps, masked(here).num_timesteps)
    make_studies(here / "study")
