"""
Watch an agent that ``train_mujoco.py`` has trained.

    python examples/watch_agent.py runs/uatrpo_Hopper-v4_0 --env Hopper-v4

In the window of a MuJoCo task, Tab switches to the camera that follows the agent.
"""

import argparse
import warnings
from pathlib import Path

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO, MatchedTRPO

# As in train_mujoco.py
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)


def main(args: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--algo", choices=["uatrpo", "uatrpo_shrinkage", "trpo_matched"], default="uatrpo")
    parser.add_argument("--n-episodes", type=int, default=3)
    parser.add_argument("--render-mode", choices=["human", "none"], default="human", help="none only prints returns")
    options = parser.parse_args(args)
    if options.n_episodes < 1:
        parser.error(f"--n-episodes must be at least 1, but it is {options.n_episodes}")
    if not (options.folder / "model.zip").exists():
        parser.error(f"folder: there is no model.zip in {options.folder}")

    mode = None if options.render_mode == "none" else options.render_mode
    # The agent expects observations that are standardised as in training
    env = VecNormalize.load(
        str(options.folder / "vecnormalize.pkl"), make_vec_env(options.env, env_kwargs={"render_mode": mode})
    )
    env.training = False
    cls = MatchedTRPO if options.algo == "trpo_matched" else UATRPO
    model = cls.load(options.folder / "model.zip", device="cpu")
    returns, _ = evaluate_policy(
        model, env, n_eval_episodes=options.n_episodes, render=mode is not None, return_episode_rewards=True
    )
    assert isinstance(returns, list)
    for i, value in enumerate(returns):
        print(f"episode {i + 1}: return {value:.1f}")
    env.close()
    return returns


if __name__ == "__main__":
    main()
