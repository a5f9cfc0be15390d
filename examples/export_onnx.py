"""
Export a policy as an ONNX file, and compare its actions with ``predict``.

    python examples/export_onnx.py runs/uatrpo_Hopper-v4_0 --env Hopper-v4
    python examples/export_onnx.py uatrpo_hopper.zip --env Hopper-v5

The policy is that of a run of ``train_mujoco.py`` or RL Zoo, or of a saved model, with its statistics of VecNormalize,
which are found as in ``watch_agent.py``. The file maps raw observations, one per row, to the actions of
``predict(..., deterministic=True)``: it normalises observations if the agent was trained that way, and clips actions
to the bounds of the action space. Using it requires neither this package nor torch.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize
from watch_agent import add_agent_arguments, load_agent

try:
    import onnxruntime
    import onnxscript  # noqa: F401 (torch.onnx needs it)
except ModuleNotFoundError as error:
    sys.exit(f'{error}: run pip install ".[mujoco,onnx]" in a clone of sb3_uatrpo')

# Silence torch's exporter about its own internals, and about torchvision operators that no policy uses
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*", category=FutureWarning)
logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)


class DeterministicPolicy(th.nn.Module):
    """
    From raw observations to the actions of ``predict(..., deterministic=True)``.

    :param policy: a policy that does not squash its actions
    :param normalization: holds the running statistics of the observations; ``None`` if there are none
    """

    mean: th.Tensor
    scale: th.Tensor

    def __init__(self, policy: ActorCriticPolicy, normalization: VecNormalize | None) -> None:
        super().__init__()
        self.policy = policy
        self.normalizes = normalization is not None and normalization.norm_obs
        if normalization is not None and normalization.norm_obs:
            self.clip_obs = normalization.clip_obs
            statistics: Any = normalization.obs_rms
            scale = np.sqrt(statistics.var + normalization.epsilon)
            self.register_buffer("mean", th.as_tensor(statistics.mean, dtype=th.float32))
            self.register_buffer("scale", th.as_tensor(scale, dtype=th.float32))
        self.bounds = None
        if isinstance(policy.action_space, spaces.Box):
            self.bounds = th.as_tensor(policy.action_space.low), th.as_tensor(policy.action_space.high)

    def forward(self, observation: th.Tensor) -> th.Tensor:
        if self.normalizes:
            observation = ((observation - self.mean) / self.scale).clamp(-self.clip_obs, self.clip_obs)
        action = self.policy.get_distribution(observation).get_actions(deterministic=True)
        return action if self.bounds is None else action.clamp(*self.bounds)


def main(args: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_agent_arguments(parser)
    parser.add_argument("--output", type=Path, help="default: policy.onnx beside the model")
    parser.add_argument("--n-steps", type=int, default=1000, help="observations on which actions are compared")
    options = parser.parse_args(args)
    if options.n_steps < 1:
        parser.error(f"--n-steps must be at least 1, but it is {options.n_steps}")
    folder: Path = options.agent if options.agent.is_dir() else options.agent.parent
    output: Path = options.output or folder / "policy.onnx"
    if not output.parent.is_dir():
        parser.error(f"--output: there is no folder {output.parent}")
    model, env = load_agent(parser, options)
    normalization = env if isinstance(env, VecNormalize) else None
    # a Dict has no shape
    if len(model.observation_space.shape or ()) != 1:
        parser.error(f"only vector observations are supported, but the observations of {options.env} are not vectors")

    def raw() -> np.ndarray:
        """:return: the observations before VecNormalize, whose work the exported file does itself"""
        original: Any = observations if normalization is None else normalization.get_original_obs()
        return np.asarray(original, np.float32)

    observations: Any = env.reset()
    # torch.export cannot trace the checks of distributions, which branch on values
    th.distributions.Distribution.set_default_validate_args(False)
    th.onnx.export(
        DeterministicPolicy(model.policy, normalization).eval(),
        (th.as_tensor(raw()),),
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
        (exported,) = session.run(["action"], {"observation": raw()})
        largest = max(largest, float(np.abs(exported - actions).max()))
        observations, _, _, _ = env.step(actions)
    env.close()
    print(f"{output}: {output.stat().st_size / 1e3:.0f} kB")
    print(f"largest difference from predict over {options.n_steps} observations: {largest:.1e}")
    return largest


if __name__ == "__main__":
    main()
