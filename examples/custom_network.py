"""
Your own network: a features extractor with attention, separate for actor and critic.

    python examples/custom_network.py

UATRPO finds the actor's parameters in the autograd graph of the action distribution, so any network that can be
differentiated twice works. Attention can within ``sdpa_kernel(SDPBackend.MATH)``. Only the actor's steps train the
layers that actor and critic share: give the critic its own
extractor if the extractor has parameters.
"""

import argparse

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import safe_mean
from torch.nn.attention import SDPBackend, sdpa_kernel

from sb3_uatrpo import UATRPO


class AttentionExtractor(BaseFeaturesExtractor):
    """Each number of the observation is a token; attention mixes them."""

    def __init__(self, observation_space: spaces.Box, width: int = 16) -> None:
        super().__init__(observation_space, features_dim=width)
        n_tokens = observation_space.shape[0]
        self.value = th.nn.Linear(1, width)
        self.place = th.nn.Parameter(0.1 * th.randn(n_tokens, width))
        self.attention = th.nn.MultiheadAttention(width, num_heads=2, batch_first=True)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        tokens = self.value(observations[..., None]) + self.place
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return mixed.mean(dim=1)


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=30_000)
    options = parser.parse_args(args)
    th.set_num_threads(1)

    policy_kwargs = {
        "features_extractor_class": AttentionExtractor,
        "features_extractor_kwargs": {"width": 16},
        "share_features_extractor": False,
        "net_arch": {"pi": [32], "vf": [64, 64]},
        "activation_fn": th.nn.SiLU,
    }
    with sdpa_kernel(SDPBackend.MATH):
        model = UATRPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy_kwargs, seed=0, device="cpu", verbose=1)
        model.learn(options.n_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {safe_mean(returns):.0f} of 500")
    return model


if __name__ == "__main__":
    main()
