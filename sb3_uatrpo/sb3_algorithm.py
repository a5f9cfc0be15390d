"""The Stable-Baselines3 side of the trust region methods: construct, check, seed, load, and act in rollouts."""

import io
import json
import pathlib
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file, open_path
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from sb3_uatrpo.arguments import RULES, Rule, check_class, check_optional
from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.plain import as_plain_mlp
from sb3_uatrpo.policies import ActsInNumpy, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.policy_check import check_policy
from sb3_uatrpo.rollout_pool import RolloutPool, require_plain_buffer

#: Keeps the random numbers of the subsample apart from those of Ω
SUBSAMPLE = 1
#: Files without it name Stable-Baselines3's classes where this package's were used
FILE_FORMAT = 2
#: At least one of them tells the files of this package from those of others
OWN_SETTINGS = frozenset({"adversarial_noise", "fast_rollouts", "line_search_kl_factor"})

SelfSB3Algorithm = TypeVar("SelfSB3Algorithm", bound="SB3Algorithm")


class SB3Algorithm(OnPolicyAlgorithm):
    """
    Everything but the update. ``UATRPO`` and ``MatchedTRPO`` document the arguments; those that are not named here are
    ``OnPolicyAlgorithm``'s. A subclass calls ``_setup_model`` when all arguments are attributes.
    """

    #: arguments that tell the files of a subclass from those of another
    _OWN_ARGUMENTS: ClassVar[frozenset[str]]
    #: whether rollouts and updates use the environment's action masks
    _takes_masks: ClassVar[bool] = False
    #: the class that policies have to be of, and the spaces that they act in
    _POLICY: ClassVar[type[BasePolicy]] = ActorCriticPolicy
    _ACTION_SPACES: ClassVar[tuple[type[spaces.Space], ...]] = (
        spaces.Box,
        spaces.Discrete,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    #: for each argument, what takes its name and value, and returns the value or raises a ValueError
    _RULES: ClassVar[dict[str, Rule]] = RULES

    _file_format = 0
    #: whether the last call of ``learn`` was on observations that VecNormalize had normalised
    _learned_normalized = False

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        *,
        batch_size: int,
        sub_sampling_factor: int,
        n_reused_rollouts: int,
        normalize_advantage: bool,
        adversarial_noise: float,
        line_search_shrinking_factor: float,
        line_search_max_iter: int,
        line_search_kl_factor: float,
        n_critic_updates: int,
        fast_rollouts: bool,
        policy_kwargs: dict[str, Any] | None,
        verbose: int,
        _init_setup_model: bool,
        **sb3_arguments: Any,
    ) -> None:
        check_class("policy", policy, self._POLICY, tuple(self.policy_aliases))
        check_optional("policy_kwargs", policy_kwargs, Mapping, "a dict")
        super().__init__(
            policy,
            env,
            # No entropy bonus; the value function has its own loss; the trust region bounds the step
            ent_coef=0.0,
            vf_coef=0.0,
            max_grad_norm=0.0,
            # the user's own dict, or a preset's, stays as it is
            policy_kwargs=None if policy_kwargs is None else dict(policy_kwargs),
            verbose=self._RULES["verbose"]("verbose", verbose),
            _init_setup_model=False,
            supported_action_spaces=self._ACTION_SPACES,
            **sb3_arguments,
        )
        self.batch_size = batch_size
        self.sub_sampling_factor = sub_sampling_factor
        self.n_reused_rollouts = n_reused_rollouts
        self.normalize_advantage = normalize_advantage
        self.adversarial_noise = adversarial_noise
        self.line_search_shrinking_factor = line_search_shrinking_factor
        self.line_search_max_iter = line_search_max_iter
        self.line_search_kl_factor = line_search_kl_factor
        self.n_critic_updates = n_critic_updates
        self.fast_rollouts = fast_rollouts
        # load() sets up later, and takes the format and then the parameters from the file
        self._awaits_parameters = not _init_setup_model
        if _init_setup_model:
            self._file_format = FILE_FORMAT

    def _setup_model(self) -> None:
        # Here and not in the constructor, so that arguments changed by load() are checked too
        self._check_arguments()
        check_class("policy", self.policy_class, self._POLICY, tuple(self.policy_aliases))
        self._warn_of_truncated_minibatches()
        if self._has_one_action:
            warnings.warn(
                "The action space has one action: nothing can be chosen, and only the critic learns.", stacklevel=3
            )
        is_old = self._file_format < FILE_FORMAT
        self._file_format = FILE_FORMAT
        if is_old and self.policy_class is ActorCriticPolicy:
            self.policy_class = MlpPolicy
        if self.rollout_buffer_class is None or (is_old and self.rollout_buffer_class is RolloutBuffer):
            # for Dict observations, Stable-Baselines3 chooses
            is_dict = isinstance(self.observation_space, spaces.Dict)
            self.rollout_buffer_class = None if is_dict else LeanRolloutBuffer
        super()._setup_model()
        # load() restores it; the constructor makes it
        if "subsample_generator" not in vars(self):
            self.subsample_generator = np.random.default_rng(self._generator_seed(self.seed, SUBSAMPLE))
        self.rollout_pool = RolloutPool(self.n_reused_rollouts)
        if self.n_reused_rollouts > 0:
            require_plain_buffer(self.rollout_buffer)
        #: names of the parameters that some batch has used
        self._acting_params: list[str] = vars(self).get("_acting_params", [])
        self._n_actor_params, self._first_error = check_policy(self.policy)

    def _check_arguments(self) -> None:
        """
        Check the arguments, and make NumPy's numbers Python's.

        :raises ValueError: if a number, flag or choice is out of range, of the wrong type, NaN or infinite
        """
        # unlike the constructor, load() needs none: the file has this number
        if not hasattr(self, "n_envs"):
            raise ValueError("env must be an environment, or the name of a registered one, but it is None")
        for name, rule in self._RULES.items():
            # Stable-Baselines3 hides this one
            attribute = "_stats_window_size" if name == "stats_window_size" else name
            setattr(self, attribute, rule(name, getattr(self, attribute)))

        if isinstance(self.action_space, spaces.MultiDiscrete) and self.action_space.nvec.ndim > 1:
            raise ValueError(
                f"env: MultiDiscrete actions must have one dimension, but the action space is {self.action_space}"
            )
        n_total = self.n_steps * self.n_envs
        if n_total < 2:
            raise ValueError(
                "n_steps * n_envs must be at least 2, since the covariance of the gradient needs two samples, "
                f"but n_steps is {self.n_steps} and n_envs is {self.n_envs}"
            )

    def _warn_of_truncated_minibatches(self) -> None:
        n_total = self.n_steps * self.n_envs
        if n_total % self.batch_size > 0:
            warnings.warn(
                f"batch_size={self.batch_size} does not divide the rollout of n_steps * n_envs = {n_total} steps "
                f"(n_steps={self.n_steps} and n_envs={self.n_envs}): in each epoch of the critic the last minibatch is "
                f"truncated to {n_total % self.batch_size} steps. A factor of {n_total} is recommended.",
                stacklevel=2,
            )

    @property
    def _has_one_action(self) -> bool:
        return isinstance(self.action_space, spaces.Discrete) and self.action_space.n == 1

    def _excluded_save_params(self) -> list[str]:
        # an exception may hold anything; rollouts are a state dict
        return [*super()._excluded_save_params(), "_first_error", "rollout_pool", "_awaits_parameters"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        return [*state_dicts, "rollout_pool"] if self.n_reused_rollouts > 0 else state_dicts, variables

    def set_parameters(
        self, load_path_or_dict: str | dict[str, Any], exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        As Stable-Baselines3's. Of a file, old rollouts and the sketch may be missing, as other algorithms have neither:
        there are none then.
        """
        given = load_path_or_dict
        params: dict[str, Any] = (
            dict(given) if isinstance(given, dict) else load_from_zip_file(given, device=device, load_data=False)[1]
        )
        if self.n_reused_rollouts == 0:
            params.pop("rollout_pool", None)
        if exact_match and (self._awaits_parameters or not isinstance(given, dict)):
            params = self._fresh_states() | params
        self._awaits_parameters = False
        super().set_parameters(params, exact_match, device)

    def _fresh_states(self) -> dict[str, Any]:
        return {"rollout_pool": {}} if self.n_reused_rollouts > 0 else {}

    # by default, it would look for a policy of another name
    def _maybe_recommend_cpu(self, mlp_class_name: str = "MlpPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed everything random, as Stable-Baselines3 does, and the generators of the subsample and of Ω.

        An Ω that has been drawn already stays.

        :param seed: from 0 to 2³²-1; ``None`` changes nothing
        """
        super().set_random_seed(seed)
        # The constructor and load() call this before there is a policy: load() keeps the generators of the file
        if seed is not None and "policy" in vars(self):
            self._seed_generators(seed)

    def _seed_generators(self, seed: int) -> None:
        self.subsample_generator = np.random.default_rng(self._generator_seed(seed, SUBSAMPLE))

    @staticmethod
    def _generator_seed(seed: int | None, *purpose: int) -> int:
        """63 bits that seed a generator of the algorithm's own. Each purpose gets others."""
        if seed is None:
            # a draw from the global generator, as for everything else without a seed
            return int(th.randint(2**63 - 1, ()))
        # not the seed itself: the generator would repeat the numbers that initialised the policy
        return int(np.random.SeedSequence(seed, spawn_key=purpose).generate_state(1, np.uint64)[0]) >> 1

    @classmethod
    def load(
        cls: type[SelfSB3Algorithm], path: str | pathlib.Path | io.BufferedIOBase, *args: Any, **kwargs: Any
    ) -> SelfSB3Algorithm:
        """
        Load a model from a zip-file. The arguments are Stable-Baselines3's.

        :raises ValueError: if another algorithm saved the file, or an argument has a bad value
        """
        cls._refuse_other_algorithms(path)
        model = super().load(path, *args, **kwargs)
        if model.env is not None:
            model._warn_of_raw_observations()
        return model

    @classmethod
    def _refuse_other_algorithms(cls, path: str | pathlib.Path | io.BufferedIOBase) -> None:
        """The parameters of other algorithms may fit, and settings of the same name, but on other scales."""
        file = open_path(path, "r", suffix="zip")
        start, settings = file.tell(), None
        # Stable-Baselines3 has a message for a file that is no archive
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            settings = json.loads(archive.read("data")) if "data" in archive.namelist() else None
        if file is path:
            file.seek(start)
        else:
            file.close()
        if settings is not None and not (OWN_SETTINGS & settings.keys() and cls._OWN_ARGUMENTS & settings.keys()):
            raise ValueError(f"path must be a file that {cls.__name__} saved, but another algorithm saved {path}")

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Replace the environment, as Stable-Baselines3 does; the arguments are its own."""
        super().set_env(env, force_reset)
        self.rollout_pool.clear()
        assert self.env is not None
        self._vec_normalize_env = unwrap_vec_normalize(self.env)
        self._warn_of_raw_observations()

    @property
    def _is_normalized(self) -> bool:
        return self._vec_normalize_env is not None and self._vec_normalize_env.norm_obs

    def _warn_of_raw_observations(self) -> None:
        if self._learned_normalized and not self._is_normalized:
            warnings.warn(
                "The model was trained with VecNormalize's observations, and this environment has none: load the "
                "statistics with VecNormalize.load(path, env), or returns will be low.",
                stacklevel=3,
            )

    def learn(
        self: SelfSB3Algorithm,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfSB3Algorithm:
        """As Stable-Baselines3's; ``tb_log_name`` is by default the name of the class."""
        name = tb_log_name or type(self).__name__
        return super().learn(total_timesteps, callback, log_interval, name, reset_num_timesteps, progress_bar)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        # attributes may have changed since the model was made
        self._check_arguments()
        if self.n_steps != self.rollout_buffer.buffer_size:
            raise ValueError(
                f"n_steps must be {self.rollout_buffer.buffer_size}, as when the model was made, but it is "
                f"{self.n_steps}; load() can change it"
            )
        self._learned_normalized = self._is_normalized
        if not self._takes_masks and self._has_unused_masks():
            warnings.warn(
                f"{type(self).__name__} ignores the environment's action_masks. MaskableUATRPO and MaskableMatchedTRPO "
                "of sb3_uatrpo.maskable use them.",
                stacklevel=4,
            )
        return super()._setup_learn(*args, **kwargs)

    def _has_unused_masks(self) -> bool:
        """Whether the environments have masks, unless they seem to be in the observations, too."""
        space = self.observation_space
        if self.env is None or (isinstance(space, spaces.Dict) and any("mask" in key.lower() for key in space)):
            return False
        try:
            return self.env.has_attr("action_masks")
        except Exception:
            # a VecEnv of the user's need not answer
            return False

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        """Fill the buffer with the experience of the current policy; arguments and result are Stable-Baselines3's."""
        with self._acting_in_numpy():
            return super().collect_rollouts(*args, **kwargs)

    def _acting_in_numpy(self) -> AbstractContextManager[None]:
        policy: Any = self.policy
        is_fast = self.fast_rollouts and isinstance(policy, ActsInNumpy)
        return policy.acting_in_numpy(as_plain_mlp) if is_fast else nullcontext()
