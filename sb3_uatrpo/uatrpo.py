"""UATRPO: how the paper finds a direction and its length."""

import copy
import io
import math
import pathlib
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_uatrpo.arguments import Rule, check_bool, check_choice, check_integer, check_rate, check_real, explain_unknown
from sb3_uatrpo.core.confidence import confidence_radius_squared
from sb3_uatrpo.core.sketch import Sketch
from sb3_uatrpo.core.step_length import step_length
from sb3_uatrpo.core.subspace import PROJECTION_SOLVERS, ProjectionSolver, subspace_direction
from sb3_uatrpo.trust_region_algorithm import Direction, Length, PolicyEstimates, TrustRegionAlgorithm

SampleUnit = Literal["trajectory", "step"]
StepLengthSamples = Literal["subsample", "batch"]

#: δ_UA of the paper
TRUST_REGION_DELTA = 0.03
#: The first file with a sketch of more bytes gives a warning
LARGE_SKETCH = 10**8


class UATRPO(TrustRegionAlgorithm):
    r"""
    Uncertainty-Aware Trust Region Policy Optimization (UA-TRPO)

    Paper: James Queeney, Ioannis Ch. Paschalidis, Christos G. Cassandras, *Uncertainty-Aware Policy Optimization:
    A Robust, Adaptive Trust Region Approach*, AAAI 2021, https://arxiv.org/abs/2012.10791

    Each update maximises ĝ'(θ - θ_k) over the uncertainty-aware trust region

    .. math:: \tfrac12(\theta-\theta_k)'\hat M(\theta-\theta_k)\le\delta_{UA},
        \qquad \hat M=\hat F+c\,R_n^2\,\hat\Sigma

    within the range of M̂: v = M̂⁺ĝ by random projections (paper, Algorithm 1), η = √(2δ_UA/v'M̂v), θ ← θ_k + ηv
    (Algorithm 2). The projections are averaged over updates (appendix, Algorithm 3).

    The defaults are the paper's. Two arguments go beyond the paper: ``shrinkage`` and ``target_kl``.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: The environment to learn from (if registered in Gym, can be str)
    :param learning_rate: Of the value function; it can be a function of the remaining progress, from 1 to 0
    :param n_steps: The number of steps to run for each environment per update; the buffer holds n_steps * n_envs
    :param batch_size: Minibatch size for the value function
    :param gamma: Discount factor γ, in [0, 1]
    :param gae_lambda: Factor λ for trade-off of bias vs variance for Generalized Advantage Estimator, in [0, 1]
    :param trust_region_delta: δ_UA > 0, size of the trust region in nats. Without ``shrinkage`` it bounds the KL
        divergence and the uncertainty penalty together; with it, their sum may reach δ_UA/(1-ρ). Not used with
        ``target_kl``.
    :param uncertainty_coef: c ≥ 0, weight of the gradient's covariance Σ relative to the Fisher matrix F; 0 gives
        TRPO's trust region
    :param confidence_alpha: α in (0, 1); the uncertainty set misses the true gradient with probability at most α
    :param n_projections: m ≥ 1, number of random projections. Without ``shrinkage``, the step lies in a subspace of at
        most m dimensions. With as many as there are actor parameters, or more, nothing is projected: Ω is the identity,
        and the direction is the exact pseudo-inverse solution.
    :param ema_beta: β in [0, 1), weight of the past in the moving averages of the projections; 0 uses the current
        batch alone and stores no average
    :param sample_unit: what counts as one of the n samples in R_n²: ``"trajectory"`` (for each environment, the
        episodes that start in the rollout, at least one) or ``"step"``
    :param sub_sampling_factor: F̂ and Σ̂ are estimated from one step, drawn at random, of each
        ``sub_sampling_factor`` consecutive steps of the batch
    :param step_length_samples: the steps from which the M̂ in η is estimated: the ``"subsample"``, or the whole
        ``"batch"``
    :param projection_solver: reconstruction of M̃: ``"least_squares"``, as in the paper, or ``"nystrom"``
    :param shrinkage: ρ in [0, 1). The trust region matrix is M_ρ = (1-ρ)·M̂ + ρ·(tr M̂/d)·I (Ledoit and Wolf, 2004). 0,
        as in the paper, keeps the step in the observed subspace. Any other value lets the step leave it, and small
        values do so most.
    :param target_kl: estimated KL divergence of the proposed step in nats, η = √(2·``target_kl``/v'F̂v), as in TRPO.
        ``trust_region_delta`` is then not used, and the uncertainty term shapes only the direction. ``None``, as in the
        paper, takes the length from ``trust_region_delta``.
    :param sketch_memory_limit: maximum size of Ω, Y_F and Y_Σ together, in bytes. ``n_projections`` is lowered to fit,
        with a warning. If not even one fits, construction fails, or the update that needs more room.
    :param save_sketch: Whether saved models contain the sketch, which continued training needs to go on exactly.
        ``False`` makes the files small, those of callbacks too.
    :param n_reused_rollouts: N ≥ 0. The actor's update also uses the last N rollouts, with importance ratios; the
        critic's does not. 0, as in the paper, uses the newest alone. Rollouts are kept in memory and in saved models.
    :param normalize_advantage: Whether to normalise the advantages over the batch. Without it, Σ grows with the
        square of the rewards' scale, and ``uncertainty_coef`` has to be chosen for that scale.
    :param adversarial_noise: size x ≥ 0 of an adversarial perturbation of the gradient, in standard errors: ĝ_j is
        replaced by ĝ_j - x·se_j·sign(ĝ_j), where se_j is the standard error of ĝ_j over the batch (paper, "Adversarial
        Gradient Noise")
    :param line_search_shrinking_factor: step-size reduction factor κ for the line search, in (0, 1)
    :param line_search_max_iter: maximum number of trials of the line search, κ^0 to κ^(max_iter-1)
    :param line_search_kl_factor: the line search accepts a KL divergence up to this many times the estimated one
    :param n_critic_updates: number of epochs in which the value function is trained on the batch in each update; 0
        leaves it unchanged
    :param use_sde: Whether to use generalized State Dependent Exploration (gSDE) instead of action noise exploration
    :param sde_sample_freq: With gSDE, sample a new noise matrix every n steps; -1: only at the beginning of a rollout
    :param rollout_buffer_class: Rollout buffer class to use. If ``None``, it will be automatically selected.
    :param rollout_buffer_kwargs: Keyword arguments to pass to the rollout buffer on creation
    :param fast_rollouts: Whether NumPy acts in rollouts where the policy is a plain MLP on the CPU. ``False`` leaves
        acting to Stable-Baselines3.
    :param stats_window_size: Number of episodes over which logged returns, lengths and success rates are averaged
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: the verbosity level: 0 no output, 1 info, 2 debug
    :param seed: Seed for the pseudo random generators; Ω has its own generator, seeded from it
    :param device: Device (cpu, cuda, ...) on which the code should be run; ``"auto"``: on the GPU if possible
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: if a number, flag or choice is out of range, of the wrong type, NaN or infinite
    """

    _OWN_ARGUMENTS = frozenset({"uncertainty_coef", "n_projections", "ema_beta"})
    _RULES: ClassVar[dict[str, Rule]] = TrustRegionAlgorithm._RULES | {
        "trust_region_delta": partial(check_real, low=0.0),
        "uncertainty_coef": check_rate,
        "confidence_alpha": partial(check_real, low=0.0, high=1.0),
        "n_projections": partial(check_integer, low=1),
        "ema_beta": partial(check_real, low=0.0, high=1.0, low_included=True),
        "sample_unit": partial(check_choice, choices=get_args(SampleUnit)),
        "step_length_samples": partial(check_choice, choices=get_args(StepLengthSamples)),
        "projection_solver": partial(check_choice, choices=PROJECTION_SOLVERS),
        "shrinkage": partial(check_real, low=0.0, high=1.0, low_included=True),
        "target_kl": lambda name, value: None if value is None else check_real(name, value, 0.0, or_none=True),
        "sketch_memory_limit": partial(check_integer, low=1),
        "save_sketch": check_bool,
    }

    @explain_unknown
    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        n_steps: int = 1000,
        batch_size: int = 50,
        gamma: float = 0.995,
        gae_lambda: float = 0.97,
        trust_region_delta: float = TRUST_REGION_DELTA,
        uncertainty_coef: float = 6e-4,
        confidence_alpha: float = 0.05,
        n_projections: int = 200,
        ema_beta: float = 0.9,
        sample_unit: SampleUnit = "trajectory",
        sub_sampling_factor: int = 10,
        step_length_samples: StepLengthSamples = "subsample",
        projection_solver: ProjectionSolver = "least_squares",
        shrinkage: float = 0.0,
        target_kl: float | None = None,
        sketch_memory_limit: int = 2**30,
        save_sketch: bool = True,
        n_reused_rollouts: int = 0,
        normalize_advantage: bool = True,
        adversarial_noise: float = 0.0,
        line_search_shrinking_factor: float = 0.8,
        line_search_max_iter: int = 10,
        line_search_kl_factor: float = 1.5,
        n_critic_updates: int = 5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        fast_rollouts: bool = True,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            gamma=gamma,
            gae_lambda=gae_lambda,
            sub_sampling_factor=sub_sampling_factor,
            n_reused_rollouts=n_reused_rollouts,
            normalize_advantage=normalize_advantage,
            adversarial_noise=adversarial_noise,
            line_search_shrinking_factor=line_search_shrinking_factor,
            line_search_max_iter=line_search_max_iter,
            line_search_kl_factor=line_search_kl_factor,
            n_critic_updates=n_critic_updates,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            fast_rollouts=fast_rollouts,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )
        self.trust_region_delta = trust_region_delta
        self.uncertainty_coef = uncertainty_coef
        self.confidence_alpha = confidence_alpha
        self.n_projections = n_projections
        self.ema_beta = ema_beta
        self.sample_unit = sample_unit
        self.step_length_samples = step_length_samples
        self.projection_solver = projection_solver
        self.shrinkage = shrinkage
        self.target_kl = target_kl
        self.sketch_memory_limit = sketch_memory_limit
        self.save_sketch = save_sketch
        if not _init_setup_model:
            return
        self._setup_model()
        if "log_std_init" in self.policy_kwargs and not isinstance(self.action_space, spaces.Box):
            warnings.warn(
                f"policy_kwargs: log_std_init has no effect with the action space {self.action_space}. RECOMMENDED is "
                "for continuous actions; RECOMMENDED_DISCRETE is for discrete ones.",
                stacklevel=3,
            )
        if self.verbose >= 1 and self._n_actor_params > 0:
            print(
                f"The sketch of {self._n_actor_params} actor parameters and {self.sketch.shape[1]} projections takes "
                f"{self.sketch.n_bytes / 1e6:.1f} MB, in memory and in each checkpoint"
            )

    def _setup_model(self) -> None:
        super()._setup_model()
        self._warned_of_size = False
        #: moving averages of g'v(g) and e'v(e), see ``_noise_scale``
        self._signal, self._noise = vars(self).get("_signal", 0.0), vars(self).get("_noise", 0.0)
        if self.target_kl is not None and self.trust_region_delta != TRUST_REGION_DELTA:
            warnings.warn(
                f"trust_region_delta={self.trust_region_delta} has no effect, since target_kl={self.target_kl} sets "
                "the length of the step; give one of the two.",
                stacklevel=3,
            )
        seed = self._generator_seed(self.seed)
        n_params = self._n_actor_params
        dtype = next(self.policy.parameters()).dtype
        n_projections = self._projections_that_fit(n_params, dtype, known=None)
        self.sketch = Sketch(n_params, n_projections, self.ema_beta, seed, dtype, self.device)

    def _seed_generators(self, seed: int) -> None:
        super()._seed_generators(seed)
        self.sketch.generator.manual_seed(self._generator_seed(seed))

    def _projections_that_fit(self, n_params: int, dtype: th.dtype, known: int | None) -> int:
        """
        m, at most d, and lowered to what fits into ``sketch_memory_limit``, with a warning unless it is ``known``. A d
        of 0 is not known yet, and fits.
        """
        if n_params == 0:
            return self.n_projections
        n_bytes = Sketch.bytes_per_projection(n_params, self.ema_beta, dtype)
        wanted = min(self.n_projections, n_params)
        fitting = min(wanted, self.sketch_memory_limit // n_bytes)
        if fitting == 0:
            raise ValueError(
                f"sketch_memory_limit must have room for at least one projection, {n_bytes} bytes with d={n_params} "
                f"actor parameters, but it is {self.sketch_memory_limit}"
            )
        if fitting < wanted and fitting != known:
            warnings.warn(
                f"n_projections is lowered from {wanted} to {fitting}: with d={n_params} actor parameters "
                f"each projection takes {n_bytes} bytes, and sketch_memory_limit={self.sketch_memory_limit} has no "
                "room for more.",
                stacklevel=3,
            )
        return fitting

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """
        Save the model in a zip-file. The arguments are Stable-Baselines3's; ``exclude=["sketch"]`` makes the file
        small, as ``save_sketch=False`` does for every file: acting does not need the sketch, and continued training
        starts a new one.
        """
        kept, excluded, included = self.sketch, set(exclude or ()), set(include or ())
        if "sketch" in excluded - included:
            self.sketch = self._fresh_sketch()
        elif self.save_sketch and kept.omega.numel() > 0 and kept.n_bytes > LARGE_SKETCH and not self._warned_of_size:
            self._warned_of_size = True
            warnings.warn(
                f"{path} holds a sketch of {kept.n_bytes / 1e6:.0f} MB. save_sketch=False leaves it out of saved "
                "models; only continued training needs it.",
                stacklevel=2,
            )
        try:
            super().save(path, excluded, included)
        finally:
            self.sketch = kept

    def _fresh_sketch(self) -> Sketch:
        sketch = copy.copy(self.sketch)
        sketch.clear()
        return sketch

    def _fresh_states(self) -> dict[str, Any]:
        return {**super()._fresh_states(), "sketch": self._fresh_sketch().state_dict()}

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """As Stable-Baselines3's, with the sketch if ``save_sketch``."""
        parameters = super().get_parameters()
        if not self.save_sketch:
            del parameters["sketch"]
        return parameters

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        # the generator's state, which is no float, comes last
        return [*state_dicts, "sketch"], variables

    def _find_direction(self, estimates: PolicyEstimates) -> Direction:
        gradient = estimates.gradient
        sketch = self.sketch
        n_projections = self._projections_that_fit(len(gradient), gradient.dtype, known=sketch.shape[1])
        # The averages belong to one θ and one Ω: if parameters or m are others, both start afresh, with a warning
        sketch.adapt(estimates.layout, n_projections, self.ema_beta, gradient.dtype)
        sketch.draw_once()
        fisher_omega, covariance_omega = estimates.subsample.products(sketch.omega)
        values = {"radius_squared": self._radius_squared(estimates)}
        # A moving average never recovers from a NaN, so check first; isfinite would copy both matrices, which are
        # column-major. Torch refuses a factor beyond the range of their type.
        extremes = th.stack([*fisher_omega.T.aminmax(), *covariance_omega.T.aminmax()])
        coefficient = self._coefficient(estimates)
        if not (bool(extremes.isfinite().all()) and coefficient <= th.finfo(sketch.dtype).max):
            return Direction(th.full_like(gradient, math.nan), values)
        # Y = M̂Ω = (Y_F + c·R_n²·Y_Σ)/(1-β^k) from the averages after k updates, in the memory of F̂Ω
        Y = sketch.update(fisher_omega, covariance_omega, coefficient)
        noise = estimates.whole.noise()
        solution = subspace_direction(Y, sketch.omega, gradient, self.projection_solver, self.shrinkage, noise)
        values |= {"subspace_rank": solution.rank}
        values |= self._noise_scale(
            gradient.dot(solution.vector).item(), solution.noise_form, estimates.whole.n_timesteps
        )
        return Direction(solution.vector, values, solution.isotropic_curvature)

    def _find_length(self, direction: Direction, estimates: PolicyEstimates) -> Length:
        v = direction.vector
        samples = estimates.whole if self.step_length_samples == "batch" else estimates.subsample
        fisher, covariance = samples.quadratic_forms(v)
        penalty = self._coefficient(estimates) * covariance
        if self.target_kl is not None:
            eta = step_length(self.target_kl, fisher)
        else:
            isotropic = direction.isotropic_curvature * v.double().dot(v.double()).item()
            eta = step_length(self.trust_region_delta, (1.0 - self.shrinkage) * (fisher + penalty) + isotropic)
        half = 0.5 * eta**2
        # both are zero if the direction lies outside the sampled subspace, as it may with shrinkage
        share = penalty / (fisher + penalty) if penalty > 0.0 else 0.0
        return Length(eta, half * fisher, {"uncertainty_penalty": half * penalty, "uncertainty_share": share})

    def _noise_scale(self, total: float, noise: float, n_timesteps: int) -> dict[str, float]:
        """
        The signal-to-noise ratio of ĝ = g + e in the metric of the trust region, and the batch size at which it is one
        (McCandlish and others, 2018, *An Empirical Model of Large-Batch Training*). With v(x) = M̂⁻¹x, the direction of
        a gradient x, the mean of ĝ'v(ĝ) is g'v(g), the signal, and what e'v(e) adds to it, the noise. Both are averaged
        over updates with the weight β, since those of a single batch say little.

        :param total: ĝ'v(ĝ)
        :param noise: e'v(e) of a vector with the covariance of e
        :param n_timesteps: n, to which the noise is inversely proportional
        """
        if not (math.isfinite(total) and 0.0 < noise < math.inf):
            return {}
        self._signal += (1.0 - self.ema_beta) * (total - noise - self._signal)
        self._noise += (1.0 - self.ema_beta) * (noise - self._noise)
        ratio = self._signal / self._noise
        # without a signal, no batch size is enough
        return {"gradient_snr": ratio} | ({"noise_scale": n_timesteps / ratio} if ratio > 0.0 else {})

    def _radius_squared(self, estimates: PolicyEstimates) -> float:
        n = estimates.n_trajectories if self.sample_unit == "trajectory" else estimates.whole.n_timesteps
        return confidence_radius_squared(estimates.whole.n_params, n, self.confidence_alpha)

    def _coefficient(self, estimates: PolicyEstimates) -> float:
        """c·R_n², the weight of Σ̂ in M̂."""
        return self.uncertainty_coef * self._radius_squared(estimates)
