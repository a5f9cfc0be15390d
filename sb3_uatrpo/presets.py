"""Arguments of UATRPO that were tested together, as RL Zoo's file hyperparams/uatrpo.yml has them."""

from collections.abc import Iterator, Mapping
from typing import Any


class Preset(Mapping[str, Any]):
    """Arguments of a constructor: ``UATRPO("MlpPolicy", env, **preset)``, with changes ``**preset(gamma=0.9)``."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def __call__(self, **changes: Any) -> dict[str, Any]:
        """
        :param changes: arguments to replace or add. ``policy_kwargs`` replaces or adds single entries, so that
            ``log_std_init`` stays unless it is given.
        :return: all arguments
        """
        policy_kwargs = {**self.get("policy_kwargs", {}), **(changes.get("policy_kwargs") or {})}
        return {**self, **changes, **({"policy_kwargs": policy_kwargs} if policy_kwargs else {})}

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def __repr__(self) -> str:
        return f"Preset({', '.join(f'{name}={value!r}' for name, value in self.items())})"


RECOMMENDED = Preset(
    n_steps=2000,
    gamma=0.99,
    gae_lambda=0.95,
    sub_sampling_factor=10,
    shrinkage=0.75,
    target_kl=0.02,
    step_length_samples="batch",
    policy_kwargs={"log_std_init": -1},
)
"""
For one environment with continuous actions and normalised observations, as RL Zoo's ``default`` entry has it:
``UATRPO("MlpPolicy", env, **RECOMMENDED)``, or with changes ``**RECOMMENDED(gamma=0.9999)``, which keeps the other
``policy_kwargs`` if it changes some. docs/results.md says how it was found, and docs/parameters.md which tasks want
another γ, λ and initial log std.
"""

RECOMMENDED_DISCRETE = Preset(gamma=0.99, shrinkage=0.75, target_kl=0.01, step_length_samples="batch")
"""
For discrete actions, as RL Zoo's entry for CartPole has it, and for small tasks such as Pendulum a start:
``UATRPO("MlpPolicy", env, **RECOMMENDED_DISCRETE)``.
"""
