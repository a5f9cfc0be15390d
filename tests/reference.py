"""
Slow, obviously correct versions of what the package computes: dense matrices, loops over samples, float64.

Nothing here uses the package. Policies, distributions and log-probabilities are Stable-Baselines3's.
"""

from dataclasses import dataclass

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution, MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy

EPS32 = float(np.finfo(np.float32).eps)


def _double_input(module, args):
    (observations,) = args
    if isinstance(observations, dict):
        return ({key: value.double() for key, value in observations.items()},)
    return (observations.double(),)


class _Double:
    """Parameters and features are float64, so that whole updates can be compared exactly."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.double()
        for extractor in {self.pi_features_extractor, self.vf_features_extractor}:
            extractor.register_forward_pre_hook(_double_input)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class DoublePolicy(_Double, ActorCriticPolicy):
    pass


class DoubleMultiInputPolicy(_Double, MultiInputActorCriticPolicy):
    pass


def torch_distribution(policy: ActorCriticPolicy, obs: th.Tensor):
    """The torch distribution(s) behind the policy's, since SB3 keeps one mutable object for all calls."""
    return policy.get_distribution(obs).distribution


class AllowedChoices:
    """Independent categorical distributions over what masks allow, timestep by timestep: other choices do not exist."""

    def __init__(self, logits: th.Tensor, masks: th.Tensor, sizes: list[int]):
        self.logits, self.masks, self.sizes = logits, masks, sizes

    def log_probs(self) -> list[list[th.Tensor]]:
        """log p of the allowed choices, for each timestep and distribution."""
        rows = zip(self.logits.split(self.sizes, dim=1), self.masks.split(self.sizes, dim=1), strict=True)
        parts = [[row[allowed].log_softmax(0) for row, allowed in zip(*pair, strict=True)] for pair in rows]
        return [list(timestep) for timestep in zip(*parts, strict=True)]

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        totals = []
        for log_ps, mask, action in zip(self.log_probs(), self.masks, actions.reshape(len(actions), -1), strict=True):
            places = [int(allowed[:a].sum()) for allowed, a in zip(mask.split(self.sizes), action.int(), strict=True)]
            totals.append(th.stack([log_p[i] for log_p, i in zip(log_ps, places, strict=True)]).sum())
        return th.stack(totals)

    def kl(self, new: "AllowedChoices") -> th.Tensor:
        pairs = zip(self.log_probs(), new.log_probs(), strict=True)
        return th.stack([sum((p.exp() * (p - q)).sum() for p, q in zip(*pair, strict=True)) for pair in pairs])


class WithMasks:
    """A policy with action masks, for the functions of this file: its observations are dicts with the masks."""

    def __init__(self, policy):
        self.policy, self.action_space, self.named_parameters = policy, policy.action_space, policy.named_parameters

    @staticmethod
    def observations(obs):
        """Those of the policy itself."""
        seen = {key: part for key, part in obs.items() if key != "masks"}
        return seen.get("only", seen)

    def get_distribution(self, obs):
        features = self.policy.extract_features(self.observations(obs))
        features = features[0] if isinstance(features, tuple) else features
        self.distribution = AllowedChoices(
            self.policy.action_net(self.policy.mlp_extractor.forward_actor(features)),
            obs["masks"].bool(),
            choices(self.action_space),
        )
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return self.distribution.log_prob(actions)

    def predict_values(self, obs):
        return self.policy.predict_values(self.observations(obs))


def choices(action_space: spaces.Space) -> list[int]:
    """The number of choices in each dimension of a discrete action space."""
    if isinstance(action_space, spaces.MultiBinary):
        return [2] * action_space.n
    return [int(n) for n in getattr(action_space, "nvec", [getattr(action_space, "n", None)])]


def kl_of(old, new) -> th.Tensor:
    """KL(old‖new), summed over action dimensions, shape (n,)."""
    if isinstance(old, AllowedChoices):
        return old.kl(new)
    if isinstance(old, list):
        return sum(th.distributions.kl_divergence(p, q) for p, q in zip(old, new, strict=True))
    divergence = th.distributions.kl_divergence(old, new)
    return divergence.sum(dim=1) if divergence.dim() > 1 else divergence


def actor_parameters(policy: ActorCriticPolicy) -> list[th.nn.Parameter]:
    """Everything except the critic's own parts, listed by the names they have in the tests' policies."""
    return [
        p
        for name, p in policy.named_parameters()
        if "value_net" not in name and "vf_features_extractor" not in name and p.requires_grad
    ]


def flat(tensors) -> np.ndarray:
    return th.cat([t.detach().reshape(-1) for t in tensors]).double().numpy()


def take(obs, steps: list[int]):
    """Some steps of observations, which may be a dict."""
    return {key: value[steps] for key, value in obs.items()} if isinstance(obs, dict) else obs[steps]


def log_prob(policy: ActorCriticPolicy, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
    distribution: Distribution = policy.get_distribution(obs)
    if isinstance(policy.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    elif isinstance(distribution, MultiCategoricalDistribution):
        actions = actions.long()
    elif isinstance(distribution, BernoulliDistribution):
        # torch computes in the dtype of the actions here
        actions = actions.double()
    return distribution.log_prob(actions)


def gradient_samples(policy, obs, actions, advantages) -> np.ndarray:
    """ξ_i = A_i ∇log π(a_i|s_i), one backward pass each, shape (n, d)."""
    params = actor_parameters(policy)
    rows = []
    for i in range(len(actions)):
        value = advantages[i] * log_prob(policy, take(obs, slice(i, i + 1)), actions[i : i + 1]).sum()
        rows.append(flat(th.autograd.grad(value, params)))
    return np.stack(rows)


def policy_gradient(policy, obs, actions, advantages) -> np.ndarray:
    """Gradient of mean(A·π_θ/π_θk) at θ_k, shape (d,)."""
    params = actor_parameters(policy)
    new = log_prob(policy, obs, actions)
    objective = (advantages * th.exp(new - new.detach())).mean()
    return flat(th.autograd.grad(objective, params))


def fisher_matrix(policy, obs) -> np.ndarray:
    """Hessian at θ_k of the mean KL divergence, by double backward, shape (d, d)."""
    params = actor_parameters(policy)
    old = torch_distribution(policy, obs)
    if isinstance(old, list):
        old = [th.distributions.Categorical(logits=p.logits.detach()) for p in old]
    elif isinstance(old, th.distributions.Normal):
        old = th.distributions.Normal(old.mean.detach(), old.stddev.detach())
    elif isinstance(old, AllowedChoices):
        old = AllowedChoices(old.logits.detach(), old.masks, old.sizes)
    else:
        old = type(old)(logits=old.logits.detach())
    divergence = kl_of(old, torch_distribution(policy, obs)).mean()
    gradient = th.cat([g.reshape(-1) for g in th.autograd.grad(divergence, params, create_graph=True)])
    rows = [flat(th.autograd.grad(g, params, retain_graph=True)) for g in gradient]
    return np.stack(rows)


def covariance_matrix(samples: np.ndarray) -> np.ndarray:
    """Sample covariance with n - 1, shape (d, d)."""
    return np.cov(samples, rowvar=False)


def standard_error(samples: np.ndarray) -> np.ndarray:
    """Standard error of the mean of each coordinate, shape (d,)."""
    return samples.std(axis=0, ddof=1) / np.sqrt(len(samples))


def noise_vector(samples: np.ndarray) -> np.ndarray:
    """The difference of the halves' means, scaled to the covariance of the mean of all, shape (d,)."""
    n, n_first = len(samples), len(samples) // 2
    difference = samples[:n_first].mean(axis=0) - samples[n_first:].mean(axis=0)
    return difference * np.sqrt(n_first * (n - n_first)) / n


def n_trajectories(episode_starts: np.ndarray) -> int:
    """The episodes that start in each environment (a column), or one fragment if none does; their sum."""
    total = 0
    for env in range(episode_starts.shape[1]):
        begun = sum(1 for start in episode_starts[:, env] if start)
        total += begun if begun > 0 else 1
    return total


def radius_squared(d: int, n: int, alpha: float) -> float:
    return (d + 2 * np.sqrt(d * np.log(1 / alpha)) + 2 * np.log(1 / alpha)) / n


def hutchinson_trace(Y: np.ndarray, omega: np.ndarray) -> float:
    """tr M̂ from Y = M̂Ω: d·Σω'M̂ω/Σω'ω over the columns of Ω."""
    columns = range(Y.shape[1])
    return len(Y) * sum(omega[:, j] @ Y[:, j] for j in columns) / sum(omega[:, j] @ omega[:, j] for j in columns)


def projected_direction(
    Y: np.ndarray, omega: np.ndarray, g: np.ndarray, solver: str = "least_squares", shrinkage: float = 0.0
):
    """
    Algorithm 1 of the paper with an explicit Q and both reconstructions of M̃. Returns v, the rank and Q.

    With shrinkage ρ, the matrix of what was kept is formed densely and shrunk towards (tr M̂/d)·I.
    """
    d, m = Y.shape
    U, S, _ = np.linalg.svd(Y, full_matrices=False)
    cut = max(d, m) * EPS32
    Q = U[:, S > S[0] * (min(cut, 0.1) if shrinkage > 0 else cut)]
    A, B = Q.T @ omega, Q.T @ Y
    if solver == "least_squares":
        M = np.linalg.lstsq(A.T, B.T, rcond=None)[0].T
        most = m
    else:
        C = omega.T @ Y
        eigenvalues, V = np.linalg.eigh((C + C.T) / 2)
        keep = eigenvalues > eigenvalues[-1] * m * EPS32
        M = B @ (V[:, keep] / eigenvalues[keep]) @ V[:, keep].T @ B.T
        most = d if m >= d else max(1, m // 2)
    eigenvalues, V = np.linalg.eigh((M + M.T) / 2)
    eigenvalues, V = eigenvalues[-most:], V[:, -most:]
    keep = eigenvalues > eigenvalues[-1] * len(M) * EPS32
    V, eigenvalues = V[:, keep], eigenvalues[keep]
    if shrinkage > 0:
        M_hat = (Q @ V * eigenvalues) @ (Q @ V).T
        M_shrunk = (1 - shrinkage) * M_hat + shrinkage * hutchinson_trace(Y, omega) / d * np.eye(d)
        return np.linalg.solve(M_shrunk, g), int(keep.sum()), Q
    return Q @ V @ ((V.T @ Q.T @ g) / eigenvalues), int(keep.sum()), Q


@dataclass
class ReferenceUATRPO:
    """Whole updates of UA-TRPO with dense matrices, the moving averages included."""

    omega: np.ndarray
    delta: float
    coef: float
    alpha: float
    beta: float
    solver: str = "least_squares"
    step_length_samples: str = "subsample"
    shrinkage: float = 0.0
    target_kl: float | None = None

    def __post_init__(self):
        d = len(self.omega)
        self.F, self.Sigma, self.k = np.zeros((d, d)), np.zeros((d, d)), 0
        self.signal, self.noise = 0.0, 0.0

    def step(self, policy, obs, actions, advantages, subsample: list[int], n: int, noise: float = 0.0):
        """ηv for a batch in env-major time order, with all intermediate results. F̂ and Σ̂ are of the subsample."""
        samples = gradient_samples(policy, obs, actions, advantages)
        g = samples.mean(axis=0)
        g = g - noise * standard_error(samples) * np.sign(g)
        F_sub, Sigma_sub = fisher_matrix(policy, take(obs, subsample)), covariance_matrix(samples[subsample])
        # averages of the matrices themselves, projected afterwards
        self.F = self.beta * self.F + (1 - self.beta) * F_sub
        self.Sigma = self.beta * self.Sigma + (1 - self.beta) * Sigma_sub
        self.k += 1
        c = self.coef * radius_squared(len(g), n, self.alpha)
        Y = (self.F + c * self.Sigma) @ self.omega / (1 - self.beta**self.k)
        v, rank, _ = projected_direction(Y, self.omega, g, self.solver, self.shrinkage)
        e = noise_vector(samples)
        e_form = e @ projected_direction(Y, self.omega, e, self.solver, self.shrinkage)[0]
        self.signal = self.beta * self.signal + (1 - self.beta) * (g @ v - e_form)
        self.noise = self.beta * self.noise + (1 - self.beta) * e_form
        if self.step_length_samples == "batch":
            F_sub, Sigma_sub = fisher_matrix(policy, obs), covariance_matrix(samples)
        M = F_sub + c * Sigma_sub
        mu = self.shrinkage * hutchinson_trace(Y, self.omega) / len(g)
        M_shrunk = (1 - self.shrinkage) * M + mu * np.eye(len(g))
        if self.target_kl is None:
            eta = np.sqrt(2 * self.delta / (v @ M_shrunk @ v))
        else:
            eta = np.sqrt(2 * self.target_kl / (v @ F_sub @ v))
        return {
            "step": eta * v,
            "subspace_rank": rank,
            "kl_estimated": 0.5 * eta**2 * v @ F_sub @ v,
            "uncertainty_penalty": 0.5 * eta**2 * c * v @ Sigma_sub @ v,
            "uncertainty_share": c * (v @ Sigma_sub @ v) / (v @ M @ v),
            "radius_squared": radius_squared(len(g), n, self.alpha),
            "gradient_snr": self.signal / self.noise,
        }


@dataclass
class ReferenceTRPO:
    """Updates of TRPO with the damped Fisher matrix inverted exactly."""

    delta: float
    damping: float

    def step(self, policy, obs, actions, advantages, subsample: list[int], n: int, noise: float = 0.0):
        """ηv. F̂ is of the subsample, and n has no part in it."""
        samples = gradient_samples(policy, obs, actions, advantages)
        g = samples.mean(axis=0)
        g = g - noise * standard_error(samples) * np.sign(g)
        F = fisher_matrix(policy, take(obs, subsample)) + self.damping * np.eye(len(g))
        v = np.linalg.solve(F, g)
        return {"step": np.sqrt(2 * self.delta / (v @ F @ v)) * v, "kl_estimated": self.delta}


def truncated_advantages(policy, rollout: dict, gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    """
    A and w of an old rollout, shapes (T, E), by the sum over what follows: A_t is the sum over k of γ^k λ^k times
    δ_{t+k} times the product of min(1, w) over the timesteps t+1 to t+k, until the episode ends.
    """
    T, E = rollout["rewards"].shape
    values, ratios = np.zeros((T + 1, E)), np.zeros((T, E))
    for e in range(E):
        for t in range(T):
            obs = take_step(rollout["observations"], t, e)
            action = th.as_tensor(rollout["actions"][t, e].astype(np.float32))[None]
            values[t, e] = policy.predict_values(obs).item()
            ratios[t, e] = np.exp(log_prob(policy, obs, action).sum().item() - float(rollout["log_probs"][t, e]))
        values[T, e] = policy.predict_values(take_step(rollout["last_observations"], e)).item()
    ends = np.concatenate([rollout["episode_starts"][1:], rollout["dones"][None]])
    advantages = np.zeros((T, E))
    for e in range(E):
        for t in range(T):
            weight = 1.0
            for s in range(t, T):
                if s > t:
                    weight *= gamma * gae_lambda * min(1.0, ratios[s, e])
                following = 0.0 if ends[s, e] else values[s + 1, e]
                advantages[t, e] += weight * (rollout["rewards"][s, e] + gamma * following - values[s, e])
                if ends[s, e]:
                    break
    return advantages, ratios


def take_step(obs, *place):
    """One timestep of observations, which may be a dict, as a batch."""
    if isinstance(obs, dict):
        return {key: th.as_tensor(value[place])[None] for key, value in obs.items()}
    return th.as_tensor(obs[place])[None]
