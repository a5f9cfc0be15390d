"""The policy as a function of the actor's parameters θ: what an update evaluates, and how it moves them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch as th
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torch.backends import cudnn
from torch.distributions import Normal
from torch.nn.attention import SDPBackend, sdpa_kernel

from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core.estimates import Linearization, SampleEstimates, parts_of
from sb3_uatrpo.core.layers import LayeredLinearization
from sb3_uatrpo.families import check_distribution, empty_copy, family_of, wrapped_by
from sb3_uatrpo.plain import GradientHooks, as_plain_mlp
from sb3_uatrpo.policies import evaluate_actions, masks_of

#: What the graph of one timestep's head is taken to keep where it cannot be measured.
UNKNOWN_BYTES = 2**16
#: Two evaluations of the same actions differ if half of their log-probabilities differ by more, in nats.
LOG_PROB_TOLERANCE = 0.1
#: NumPy and torch may differ by so much in a mean or logit, relative to its size. Both sum in float32.
HEAD_ROUNDING = 1e-4


class UnsupportedNetworkError(ValueError):
    """The update cannot differentiate the policy's network."""


class WrongDistributionError(ValueError):
    """The policy acts by another distribution than the one that an update would change."""


class Actor:
    """
    The action distribution of a policy as a function of the parameters that it depends on, θ ∈ R^d.

    It is the distribution that ``evaluate_actions`` leaves in the policy's ``action_dist``, as PPO trains it; a plain
    MLP may be evaluated in NumPy. Use it within ``update_mode``, and call ``find_params`` before estimating.

    :param policy: any actor-critic policy of Stable-Baselines3
    :raises UnsupportedDistributionError: if the policy's action distribution is not supported
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self.policy = policy
        self.family = family_of(policy.action_dist)
        self._kind = type(policy.action_dist)
        #: the policy's layers, if it is a plain MLP
        self.mlp = as_plain_mlp(policy)
        self._fast_layers = self.mlp if self.mlp is not None and self.mlp.is_fast_by_layers else None
        # a plain MLP has none
        self._hooks = GradientHooks(policy) if self.mlp is None else None
        #: θ_k in parts, in the policy's order
        self.params: tuple[th.Tensor, ...] = ()
        #: bytes that the graph of one timestep's head keeps, excluding the parameters
        self.bytes_per_timestep = 0
        self._torch_settings = ExitStack()

    @property
    def n_params(self) -> int:
        """d, the number of actor parameters."""
        return sum(param.numel() for param in self.params)

    @property
    def layout(self) -> th.Tensor:
        """
        How many of the d coordinates belong to each parameter of the policy: zero if the actor does not use it.

        :return: one number for each of the policy's parameters, up to the last that the actor uses
        """
        acting = set(self.params)
        sizes = [param.numel() if param in acting else 0 for param in self.policy.parameters()]
        return th.tensor(np.trim_zeros(sizes, "b"), dtype=th.float64, device="cpu")

    @contextmanager
    def update_mode(self) -> Iterator[None]:
        """
        Put the policy into the state that an update needs, and restore it afterwards.

        Evaluation mode keeps batch-norm statistics and dropout out of the update. The policy gets a copy of its
        distribution, which is dropped at the end, with its graph. Gradient hooks are detached: products with F̂ and Σ̂
        differentiate along many directions at once, and hooks are not written for that.
        """
        training = self.policy.training
        # an interrupt may come at any time
        try:
            self.policy.set_training_mode(False)
            with ExitStack() as self._torch_settings, self.distribution_of_its_own():
                if self._hooks is not None:
                    self._torch_settings.enter_context(self._hooks.attached(False))
                if any(isinstance(module, nn.RNNBase) for module in self.policy.modules()):
                    # on a GPU, cuDNN's have not even first derivatives in evaluation mode
                    self._torch_settings.enter_context(cudnn.flags(enabled=False))
                yield
        finally:
            self.policy.set_training_mode(training)

    @contextmanager
    def distribution_of_its_own(self) -> Iterator[None]:
        """Give the policy a copy of its distribution, and drop it afterwards, with the graph that it then has."""
        distribution = self.policy.action_dist
        copied = empty_copy(distribution)
        try:
            self.policy.action_dist = copied
            yield
        finally:
            self.policy.action_dist = distribution
            if isinstance(distribution, StateDependentNoiseDistribution):
                # reset_noise draws them with a graph, which a deep copy of the policy refuses
                for name in ("exploration_mat", "exploration_matrices"):
                    setattr(distribution, name, getattr(distribution, name).detach())
                weights = distribution.weights_dist
                distribution.weights_dist = Normal(weights.loc.detach(), weights.scale.detach())

    def find_params(self, batch: Batch, known: Collection[str] = ()) -> list[str]:
        """
        Find θ: the parameters that require gradients and that the action distribution of some timestep depends on.

        :param batch: all timesteps, since a network may use some parameters only at some timesteps
        :param known: names of parameters that earlier batches used; they stay in θ if this batch leaves them out
        :return: the names of θ
        :raises UnsupportedDistributionError: if ``action_dist`` becomes a distribution of another kind
        :raises WrongDistributionError: if the policy's log-probabilities are not those of its ``action_dist``
        :raises UnsupportedNetworkError: if the network cannot be differentiated twice
        """
        candidates = {name: param for name, param in self.policy.named_parameters() if param.requires_grad}
        if self._fast_layers is not None:
            acting = set(self._fast_layers.actor_params)
            used = {name for name, param in candidates.items() if param in acting}
            self.bytes_per_timestep = self._fast_layers.bytes_per_timestep
        else:
            self.bytes_per_timestep = self._size_of_graph(batch[:2])
            used = {name for name in candidates if name in known}
            differences = []
            for part in self._parts(len(batch)):
                timesteps = batch[part]
                head, log_probs = self._evaluate(timesteps)
                with th.no_grad():
                    differences.append((self.family.log_prob(head, timesteps.actions) - log_probs).abs())
                if head.requires_grad:
                    _check_graph(head)
                    gradients = th.autograd.grad(head.sum(), list(candidates.values()), allow_unused=True)
                    used |= {
                        name
                        for name, gradient in zip(candidates, gradients, strict=True)
                        # a global hook joins all outputs of a module in the graph, the critic's latent ones too
                        if gradient is not None
                        and (not (self._hooks and self._hooks.are_global) or bool(gradient.any()))
                    }
            if _is_different(th.cat(differences)):
                raise _wrong_distribution("evaluate_actions returns other log-probabilities than its action_dist")
        self.params = tuple(param for name, param in candidates.items() if name in used)
        return [name for name in candidates if name in used]

    def check_log_probs(self, batch: Batch, log_probs: th.Tensor) -> bool:
        """
        Compare the log-probabilities of the rollout with those of the distribution that is about to be updated.

        :param batch: all timesteps
        :param log_probs: log π_θk(a|s) of the distribution, shape ``(n,)``
        :return: whether they agree
        :raises WrongDistributionError: if they do not, and ``forward`` and ``evaluate_actions`` disagree as well
        """
        if not _is_different(batch.log_probs - log_probs):
            return True
        timesteps = batch[self._parts(len(batch))[0]]
        with th.random.fork_rng([self.policy.device] if self.policy.device.type == "cuda" else []), th.no_grad():
            actions, _, forward_log_probs = self.policy(timesteps.observations, **masks_of(self.policy, timesteps))
            acted = replace(timesteps, actions=actions.reshape(timesteps.actions.shape).to(timesteps.actions.dtype))
            evaluated, again = self._evaluate(acted)[1], self._evaluate(acted)[1]
        # a policy may draw random numbers beside its actions: what differs by no more than them is no disagreement
        noise = 3.0 * (evaluated - again).abs()
        if _is_different(((forward_log_probs.flatten() - evaluated).abs() - noise).relu()):
            raise _wrong_distribution(
                "forward and evaluate_actions disagree on the log-probabilities of the same actions"
            )
        if self._fast_layers is not None:
            # means or logits: with very small σ, rounding alone changes log-probabilities
            head = self._evaluate(timesteps)[0].detach()
            # what is beyond rounding, which grows with the size of the means
            differences = ((self._head_vector(timesteps) - head).abs() - HEAD_ROUNDING * head.abs()).relu()
            if _is_different(differences.amax(dim=1)):
                raise _wrong_distribution("a method of its libraries' classes was replaced")
        return False

    def _parts(self, n_timesteps: int) -> list[slice]:
        return parts_of(n_timesteps, self.bytes_per_timestep, self.policy.device)

    def _size_of_graph(self, timesteps: Batch) -> int:
        """Bytes per timestep that autograd saves for the backward pass, without the parameters; measured on a few."""
        known = {param.data_ptr() for param in self.policy.parameters()}
        sizes = []

        def count(tensor: th.Tensor) -> th.Tensor:
            # a sparse tensor has no address, and is a constant of the network rather than an activation
            if tensor.layout == th.strided and tensor.data_ptr() not in known:
                sizes.append(tensor.nbytes)
            # an output that is kept with its own graph would be in a cycle, which is never freed
            return tensor.detach()

        try:
            with th.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                head, _ = self._evaluate(timesteps)
        except RuntimeError:
            # torch.func's derivatives do not work within these hooks
            return UNKNOWN_BYTES
        if any("ScaledDotProduct" in name for name in _node_names(head)):
            # Torch's fused kernels of attention have no second derivatives. The choice is the whole process's, so it is
            # made only where it is needed
            self._torch_settings.enter_context(sdpa_kernel(SDPBackend.MATH))
            return self._size_of_graph(timesteps)
        return sum(sizes) // len(timesteps)

    def _evaluate(self, timesteps: Batch) -> tuple[th.Tensor, th.Tensor]:
        """h, shape ``(n, k)``, with its graph, and the log-probabilities of the timesteps' actions, shape ``(n,)``."""
        _, log_probs, _ = evaluate_actions(self.policy, timesteps)
        distribution = self.policy.action_dist
        if not wrapped_by(distribution):
            raise _wrong_distribution("evaluate_actions leaves no distribution in action_dist")
        check_distribution(distribution, self._kind)
        return self.family.vector(distribution), log_probs.flatten()

    def _head_vector(self, timesteps: Batch) -> th.Tensor:
        if self._fast_layers is None:
            return self._evaluate(timesteps)[0]
        return self._fast_layers.head(timesteps.observations, timesteps.action_masks)

    def heads(self, batch: Batch) -> th.Tensor:
        """:return: h of every step at the policy's current parameters, without a graph, shape ``(n, k)``"""
        with th.no_grad():
            return th.cat([self._head_vector(batch[part]) for part in self._parts(len(batch))])

    def linearize(self, timesteps: Batch) -> Linearization:
        """:return: the head of timesteps whose graph fits into memory, as a linear function of θ around θ_k"""
        chain = None
        if self._fast_layers is not None:
            chain = self._fast_layers.linearize(timesteps.observations, self.params, timesteps.action_masks)
        head = self._head_vector(timesteps) if chain is None else chain[0]
        fixed = head.detach()
        scores = timesteps.advantages[:, None] * self.family.score(fixed, timesteps.actions)

        def fisher_product(P: th.Tensor) -> th.Tensor:
            return self.family.fisher_product(fixed, P)

        if chain is None:
            return Linearization(head, self.params, fisher_product, scores)
        return LayeredLinearization(head, self.params, fisher_product, scores, *chain[1:])

    def estimates(self, batch: Batch) -> SampleEstimates:
        """:return: ĝ, F̂ and Σ̂ over the timesteps of the batch"""
        return SampleEstimates(
            lambda part: self.linearize(batch[part]),
            len(batch),
            self.n_params,
            self.bytes_per_timestep,
            self.policy.device,
            0 if self._fast_layers is None else self._fast_layers.bytes_of_jacobians,
        )

    def gradient(self, batch: Batch, estimates: SampleEstimates) -> th.Tensor:
        """
        ĝ, as the gradient hooks of parameters and modules leave it. Each hook is called once per part of the batch.

        :param batch: n timesteps
        :param estimates: estimates over the same timesteps
        :return: ĝ, shape ``(d,)``
        """
        if not self._hooks:
            return estimates.gradient()
        with self._hooks.attached(True):
            # from a graph that they are attached to
            return self.estimates(batch).gradient()

    @contextmanager
    def moving_along(self, step: th.Tensor) -> Iterator[Callable[[float], None]]:
        """
        Move to θ_k + fraction·step. The fraction 0 restores θ_k exactly, and so does an error within the context.

        :param step: shape ``(d,)``
        :return: a function that takes the fraction and moves there
        """
        starts = [param.detach().clone() for param in self.params]
        changes = [
            part.view_as(param)
            for part, param in zip(step.split([param.numel() for param in self.params]), self.params, strict=True)
        ]

        def move(fraction: float) -> None:
            with th.no_grad():
                for param, start, change in zip(self.params, starts, changes, strict=True):
                    # not 0·step, which is NaN where the step is infinite
                    param.copy_(start + fraction * change if fraction else start)

        try:
            yield move
        except BaseException:
            move(0.0)
            raise


def _is_different(differences: th.Tensor) -> bool:
    """Not if half of them are NaN, which says nothing about the policy."""
    return bool(differences.abs().median() > LOG_PROB_TOLERANCE)


def _wrong_distribution(problem: str) -> WrongDistributionError:
    return WrongDistributionError(
        f"policy: {problem}, so an update would change another distribution than the one that acts; let "
        "evaluate_actions leave the distribution by which forward acts in action_dist, as Stable-Baselines3's does"
    )


def _node_names(head: th.Tensor) -> Iterator[str]:
    """Names of the nodes of the graph of h."""
    seen, waiting = set(), [head.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            yield node.name()
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]


def _check_graph(head: th.Tensor) -> None:
    """:raises UnsupportedNetworkError: if derivatives of h are missing, or cannot be differentiated again"""
    # derivatives with respect to given parameters do not reach those inside a reentrant checkpoint
    if any("CheckpointFunction" in name or "CompiledFunction" in name for name in _node_names(head)):
        raise UnsupportedNetworkError(
            "policy: its network must be differentiable twice, and with respect to each parameter: use no "
            "torch.compile in it, and torch.utils.checkpoint with use_reentrant=False"
        )
