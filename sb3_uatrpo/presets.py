"""Arguments of UATRPO that were tried together, as in hyperparams/."""

from typing import Any, NoReturn


class _ReadOnly(dict[str, Any]):
    """A dict that many models share."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("presets cannot be changed; RECOMMENDED(gamma=0.5) returns the arguments with a change")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        # by default, pickle and copy would set the items one by one
        return type(self), (dict(self),)


class Preset(_ReadOnly):
    """
    Arguments of a constructor: ``**preset``, or with changes ``**preset(gamma=0.9)``.

    :raises TypeError: if it is changed itself
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(*args, **kwargs)
        if "policy_kwargs" in arguments:
            arguments["policy_kwargs"] = _ReadOnly(arguments["policy_kwargs"])
        super().__init__(arguments)

    def __call__(self, **changes: Any) -> dict[str, Any]:
        """
        :param changes: arguments to replace or add; ``policy_kwargs`` are merged with the preset's
        :return: all arguments
        """
        policy_kwargs = {**self.get("policy_kwargs", {}), **(changes.get("policy_kwargs") or {})}
        return {**self, **changes, **({"policy_kwargs": policy_kwargs} if policy_kwargs else {})}


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
``UATRPO("MlpPolicy", env, **RECOMMENDED)``, or with changes ``**RECOMMENDED(gamma=0.9999)``. docs/results.md says how
it was found, and docs/parameters.md which environments want another γ, λ and initial log std.
"""

RECOMMENDED_SMALL_BATCHES = Preset(RECOMMENDED(n_steps=250, target_kl=0.005, uncertainty_coef=0))
"""For 250 timesteps per update, as in hyperparams/uatrpo_small_batches.yml."""

RECOMMENDED_DISCRETE = Preset(gamma=0.99, shrinkage=0.75, target_kl=0.01, step_length_samples="batch")
"""For discrete actions, as RL Zoo's entry for CartPole has it: ``UATRPO("MlpPolicy", env, **RECOMMENDED_DISCRETE)``."""
