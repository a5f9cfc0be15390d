"""
Export what ``train_mujoco.py`` has trained as an ONNX file, and compare its actions with ``predict``.

    python examples/export_onnx.py runs/uatrpo_Hopper-v4_0 --env Hopper-v4

The file maps raw observations, one per row, to the actions of ``predict(..., deterministic=True)``. It contains the
statistics of VecNormalize and clips actions to the bounds of the action space. Using it takes neither this package nor
torch.
"""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO, MatchedTRPO

# As in train_mujoco.py
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)
# What torch's exporter says about itself, and about operators of torchvision that no policy has
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*", category=FutureWarning)
logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)


class DeterministicPolicy(th.nn.Module):
    """
    From raw observations to the actions of ``predict(..., deterministic=True)``.

    :param policy: a policy that does not squash its actions
    :param normalization: holds the running statistics of the observations
    """

    mean: th.Tensor
    scale: th.Tensor

    def __init__(self, policy: ActorCriticPolicy, normalization: VecNormalize) -> None:
        super().__init__()
        self.policy = policy
        self.clip_obs = normalization.clip_obs
        statistics: Any = normalization.obs_rms
        self.register_buffer("mean", th.as_tensor(statistics.mean, dtype=th.float32))
        self.register_buffer("scale", th.as_tensor(np.sqrt(statistics.var + normalization.epsilon), dtype=th.float32))
        self.bounds = None
        if isinstance(policy.action_space, spaces.Box):
            self.bounds = th.as_tensor(policy.action_space.low), th.as_tensor(policy.action_space.high)

    def forward(self, observation: th.Tensor) -> th.Tensor:
        normalized = ((observation - self.mean) / self.scale).clamp(-self.clip_obs, self.clip_obs)
        action = self.policy.get_distribution(normalized).get_actions(deterministic=True)
        return action if self.bounds is None else action.clamp(*self.bounds)


def main(args: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--algo", choices=["uatrpo", "uatrpo_shrinkage", "trpo_matched"], default="uatrpo")
    parser.add_argument("--output", type=Path, help="default: FOLDER/policy.onnx")
    parser.add_argument("--n-steps", type=int, default=1000, help="observations on which actions are compared")
    options = parser.parse_args(args)
    if options.n_steps < 1:
        parser.error(f"--n-steps must be at least 1, but it is {options.n_steps}")
    if not (options.folder / "model.zip").exists():
        parser.error(f"folder: there is no model.zip in {options.folder}")
    output: Path = options.output or options.folder / "policy.onnx"

    env = VecNormalize.load(str(options.folder / "vecnormalize.pkl"), make_vec_env(options.env, seed=0))
    env.training = False
    cls = MatchedTRPO if options.algo == "trpo_matched" else UATRPO
    model = cls.load(options.folder / "model.zip", device="cpu")

    observations: Any = env.reset()
    # torch.export cannot trace the checks of distributions, which branch on values
    th.distributions.Distribution.set_default_validate_args(False)
    th.onnx.export(
        DeterministicPolicy(model.policy, env).eval(),
        (th.as_tensor(env.get_original_obs(), dtype=th.float32),),
        output,
        input_names=["observation"],
        output_names=["action"],
        dynamic_shapes=({0: th.export.Dim.DYNAMIC},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )

    session = onnxruntime.InferenceSession(output)
    largest = 0.0
    for _ in range(options.n_steps):
        actions, _ = model.predict(observations, deterministic=True)
        (exported,) = session.run(["action"], {"observation": np.asarray(env.get_original_obs(), np.float32)})
        largest = max(largest, float(np.abs(exported - actions).max()))
        observations, _, _, _ = env.step(actions)
    env.close()
    print(f"{output}: {output.stat().st_size / 1e3:.0f} kB")
    print(f"largest difference from predict over {options.n_steps} observations: {largest:.1e}")
    return largest


if __name__ == "__main__":
    main()
