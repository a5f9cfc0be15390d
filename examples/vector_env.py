"""
Environments that step as one batch, such as EnvPool's, behind Stable-Baselines3's interface.

    python examples/vector_env.py
    pip install envpool && python examples/vector_env.py --envpool Pendulum-v1

``BatchVecEnv`` is the adapter. It resets finished environments immediately, as Stable-Baselines3 does: it returns the
first observation of the new episode and puts the last one of the old episode into ``infos``. A task written in NumPy
stands in for your own simulator.

With more environments and equal data, the number of trajectories n rises and c·R_n² falls (docs/using.md).
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_uatrpo import UATRPO


class PointMass:
    """
    Push a point to the origin and stop it there: all environments in one array, with EnvPool's interface.

    :param num_envs: number of environments
    :param seed: seed of the initial states
    """

    observation_space = spaces.Box(-3.0, 3.0, (4,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 100

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.state = np.zeros((num_envs, 4), np.float32)
        self.elapsed = np.zeros(num_envs, int)

    def reset(self, env_id: np.ndarray | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        env_id = np.arange(len(self.state)) if env_id is None else env_id
        self.state[env_id] = self.rng.uniform(-1.0, 1.0, (len(env_id), 4))
        self.elapsed[env_id] = 0
        return self.state[env_id], {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        position, velocity = self.state[:, :2], self.state[:, 2:]
        velocity += 0.1 * actions
        position += 0.1 * velocity
        np.clip(self.state, -3.0, 3.0, out=self.state)
        self.elapsed += 1
        rewards = -np.square(self.state).sum(axis=1)
        truncated = self.elapsed >= self.max_episode_steps
        return self.state.copy(), rewards, np.zeros_like(truncated), truncated, {}


class BatchVecEnv(VecEnv):
    """
    Stable-Baselines3's interface to environments that step as one batch.

    :param batch: has the ``observation_space`` and ``action_space`` of one environment, ``reset(env_id)``, which
        restarts some environments and returns their observations, and ``step(actions)``, like EnvPool with
        ``env_type="gymnasium"``
    :param num_envs: number of environments
    """

    def __init__(self, batch: Any, num_envs: int) -> None:
        self.batch = batch
        self.actions = np.empty(0)
        super().__init__(num_envs, batch.observation_space, batch.action_space)

    def reset(self) -> VecEnvObs:
        return self.batch.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, terminated, truncated, _ = self.batch.step(self.actions)
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        finished = np.flatnonzero(dones)
        if len(finished) > 0:
            for i in finished:
                infos[i]["terminal_observation"] = observations[i].copy()
                # if a time limit ended the episode, Stable-Baselines3 adds the last state's value to the reward
                infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            observations[finished] = self.batch.reset(finished)[0]
        return observations, rewards, dones, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        # the batch cannot be rendered
        value = None if attr_name == "render_mode" else getattr(self.batch, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        setattr(self._batch_of_all(indices), attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        result = getattr(self._batch_of_all(indices), method_name)(*args, **kwargs)
        return [result] * self.num_envs

    def _batch_of_all(self, indices: VecEnvIndices) -> Any:
        """The environments share the batch's attributes and methods, so they change together."""
        chosen = list(self._get_indices(indices))
        if chosen != list(range(self.num_envs)):
            raise ValueError(f"indices must be those of all {self.num_envs} environments, but they are {chosen}")
        return self.batch

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        # the batch was seeded when it was created
        return [None] * self.num_envs


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envpool", metavar="TASK", help="a task of EnvPool instead of the point mass")
    parser.add_argument("--n-envs", type=int, default=16)
    parser.add_argument("--n-timesteps", type=int, default=64_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    if not 1 <= options.n_envs <= 2000:
        parser.error(f"--n-envs must be from 1 to 2000, but it is {options.n_envs}")

    if options.envpool is None:
        batch: Any = PointMass(options.n_envs, options.seed)
    else:
        try:
            import envpool
        except ModuleNotFoundError as error:
            parser.error(f"--envpool: {error}; run pip install envpool")
        batch = envpool.make(options.envpool, env_type="gymnasium", num_envs=options.n_envs, seed=options.seed)
    # VecMonitor counts returns and lengths, as Monitor does for single environments
    env = VecNormalize(VecMonitor(BatchVecEnv(batch, options.n_envs)), norm_reward=False, gamma=0.95)
    # 2,000 steps for each update, from all environments together
    n_steps = 2000 // options.n_envs
    model = UATRPO("MlpPolicy", env, n_steps=n_steps, gamma=0.95, seed=options.seed, device="cpu", verbose=1)
    model.learn(options.n_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {safe_mean(returns):.1f}")
    return model


if __name__ == "__main__":
    main()
