"""The policy as a function of the actor's parameters θ: what an update evaluates, and how it moves them."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from types import FunctionType
from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import TensorDict
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sb3_uatrpo.batch import Batch, rows_of
from sb3_uatrpo.core.estimates import Linearization, SampleEstimates, parts_of
from sb3_uatrpo.core.layers import LayeredLinearization
from sb3_uatrpo.guard import RunningCode, warn_if_different
from sb3_uatrpo.heads import check_distribution, head_of, unchecked
from sb3_uatrpo.hooks import GradientHooks
from sb3_uatrpo.plain_mlp import StandardMLP

#: What the graph of one step's head is taken to keep where it cannot be measured.
UNKNOWN_BYTES = 2**16


class UnsupportedNetworkError(ValueError):
    """The update cannot differentiate the policy's network."""


class Actor:
    """
    The action distribution of a policy as a function of the parameters that it depends on, θ ∈ R^d.

    Use it within ``differentiable_policy``, and call ``find_params`` before anything else.

    :param policy: any actor-critic policy of Stable-Baselines3
    :raises UnsupportedDistributionError: if the policy's action distribution is not supported
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self.policy = policy
        self.head = head_of(policy.action_dist)
        self._kind = type(policy.action_dist)
        self._mlp = StandardMLP.recognise(policy)
        self._gradient_hooks = GradientHooks(policy)
        #: θ_k in parts, in the policy's order
        self.params: tuple[th.Tensor, ...] = ()
        #: bytes that the graph of one step's head keeps, excluding the parameters
        self.bytes_per_step = 0
        #: bytes that ∂h/∂z of all layers takes for one step, where products are computed layer by layer
        self.bytes_of_jacobians = 0

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
        while sizes and sizes[-1] == 0:
            sizes.pop()
        return th.tensor(sizes, dtype=th.float64, device="cpu")

    @contextmanager
    def differentiable_policy(self) -> Iterator[None]:
        """
        Put the policy into the state that an update needs, and restore it afterwards.

        Evaluation mode keeps batch-norm statistics and dropout out of the update. The policy gets a distribution of
        the actor's own, which does not validate its parameters and is dropped at the end, with its graph. Attention is
        computed in a form that can be differentiated twice. Gradient hooks are suspended: products with F̂ and Σ̂
        differentiate along many directions at once, and hooks are not written for that. Other policies and threads are
        not affected.
        """
        training, distribution = self.policy.training, self.policy.action_dist
        # an interrupt may come at any time
        try:
            self.policy.set_training_mode(False)
            self.policy.action_dist = unchecked(distribution)
            # a standard MLP has no attention, and the mode would intercept every torch call
            attention = _TwiceDifferentiableAttention() if self._mlp is None else nullcontext()
            # what torch.compile makes of a module can be differentiated only once
            with self._gradient_hooks.set_aside(), attention, _uncompiled(self.policy):
                yield
        finally:
            self.policy.action_dist = distribution
            self.policy.set_training_mode(training)

    def find_params(self, observations: th.Tensor | TensorDict, n_steps: int) -> None:
        """
        Find θ: the parameters that require gradients and that appear in the action distribution's graph.

        :param observations: the observations of all steps, since a network may use some parameters only at some steps
        :param n_steps: n, number of steps
        :raises UnsupportedDistributionError: if the policy returns a distribution of another kind than its
            ``action_dist``
        """
        self.bytes_per_step, size = self._size_of_graph(rows_of(observations, slice(0, 2)), min(2, n_steps))
        mlp = self._mlp if self._mlp is not None and self._mlp.is_fast_with(size) else None
        candidates = [param for param in self.policy.parameters() if param.requires_grad]
        used = [False] * len(candidates)
        heads, code = [], RunningCode()
        for part in self._parts(n_steps):
            with code.noted():
                head = self._head_vector(rows_of(observations, part))
            heads.append(head.detach())
            if head.requires_grad:
                _refuse_reentrant_checkpoints(head)
                gradients = th.autograd.grad(head.sum(), candidates, allow_unused=True)
                used = [known or gradient is not None for known, gradient in zip(used, gradients, strict=True)]
        self.params = tuple(param for param, known in zip(candidates, used, strict=True) if known)
        self._mlp = None
        if mlp is not None and code.is_library_code and set(self.params) <= set(mlp.actor_params):
            ours = th.cat([mlp.linearize(rows_of(observations, part), ())[0] for part in self._parts(n_steps)])
            if not warn_if_different(self.policy, {"the action distribution": (ours, th.cat(heads))}):
                self._mlp, self.bytes_of_jacobians = mlp, 4 * size * mlp.n_outputs

    def check_products(self, observations: th.Tensor | TensorDict) -> None:
        """
        Warn if JX misses parameters that J'U has, because the backward pass of some operation records no gradients. F̂
        and Σ̂ miss them too.

        :param observations: of a few steps
        :raises ValueError: if torch cannot differentiate the network twice, or JX misses all parameters
        """
        # layer by layer, there is nothing that could be missed
        if not self.params or self._mlp is not None:
            return
        head = self._head_vector(observations)
        try:
            missed = Linearization(head, self.params, lambda P: P, th.zeros_like(head)).missed_params()
        except th.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"policy: its network must be differentiable twice, but torch says: {reason}") from error
        if len(missed) == len(self.params):
            raise ValueError(
                "policy: its network must be differentiable twice, but no parameter can be. Look for operations whose "
                "backward pass records no gradients, such as once_differentiable."
            )
        if missed:
            names: dict[th.Tensor, str] = {param: name for name, param in self.policy.named_parameters()}
            warnings.warn(
                f"The trust region misses {', '.join(names[self.params[i]] for i in missed)}: the policy cannot be "
                "differentiated twice there. Look for operations whose backward pass records no gradients, such as "
                "once_differentiable.",
                stacklevel=5,
            )

    def _parts(self, n_steps: int) -> list[slice]:
        return parts_of(n_steps, self.bytes_per_step)

    def _size_of_graph(self, observations: th.Tensor | TensorDict, n_steps: int) -> tuple[int, int]:
        """
        Bytes per step that autograd saves for the backward pass, without the parameters, and k, the size of the head,
        both measured on a few steps.
        """
        known = {param.data_ptr() for param in self.policy.parameters()}
        n_bytes = 0

        def count(tensor: th.Tensor) -> th.Tensor:
            nonlocal n_bytes
            # a sparse tensor has no address, and is a constant of the network rather than an activation
            if tensor.layout == th.strided and tensor.data_ptr() not in known:
                n_bytes += tensor.numel() * tensor.element_size()
            # an output that is kept with its own graph would be in a cycle, which is never freed
            return tensor.detach()

        try:
            with th.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                head = self._head_vector(observations)
        except RuntimeError:
            # torch.func's derivatives do not work within these hooks
            head, n_bytes = self._head_vector(observations), n_steps * UNKNOWN_BYTES
        return n_bytes // n_steps, head.shape[1]

    def _head_vector(self, observations: th.Tensor | TensorDict) -> th.Tensor:
        distribution = self.policy.get_distribution(observations)
        check_distribution(distribution, self._kind)
        return self.head.vector(distribution)

    def heads(self, batch: Batch) -> th.Tensor:
        """
        :param batch: n steps
        :return: h of every step at the policy's current parameters, without a graph, shape ``(n, k)``
        """
        with th.no_grad():
            return th.cat([self._head_vector(batch[part].observations) for part in self._parts(len(batch))])

    def linearize(self, steps: Batch) -> Linearization:
        """
        :param steps: n steps whose graph fits into memory
        :return: their head as a linear function of θ around θ_k
        """
        chain = None if self._mlp is None else self._mlp.linearize(steps.observations, self.params)
        head = self._head_vector(steps.observations) if chain is None else chain[0]
        fixed = head.detach()
        scores = steps.advantages[:, None] * self.head.score(fixed, steps.actions)

        def fisher_product(P: th.Tensor) -> th.Tensor:
            return self.head.fisher_product(fixed, P)

        if chain is None:
            return Linearization(head, self.params, fisher_product, scores)
        return LayeredLinearization(head, self.params, fisher_product, scores, *chain[1:])

    def estimates(self, batch: Batch) -> SampleEstimates:
        """
        :param batch: n steps
        :return: ĝ, F̂ and Σ̂ over them
        """
        return SampleEstimates(
            lambda part: self.linearize(batch[part]),
            len(batch),
            self.n_params,
            self.bytes_per_step,
            self.bytes_of_jacobians,
        )

    def gradient(self, batch: Batch, estimates: SampleEstimates) -> th.Tensor:
        """
        ĝ, as the gradient hooks of parameters and modules leave it. Each hook is called once per part of the batch.

        :param batch: n steps
        :param estimates: estimates over the same steps
        :return: ĝ, shape ``(d,)``
        """
        if not self._gradient_hooks:
            return estimates.gradient()

        def of_part(part: slice) -> th.Tensor:
            steps = batch[part]
            # the policy's own graph, to which the hooks are attached
            head = self._head_vector(steps.observations)
            scores = steps.advantages[:, None] * self.head.score(head.detach(), steps.actions)
            gradients = th.autograd.grad(head, self.params, scores / len(batch), allow_unused=True)
            flat = [
                # of the head's type: some parameters may have another
                (th.zeros_like(param) if gradient is None else gradient).flatten().to(head.dtype)
                for param, gradient in zip(self.params, gradients, strict=True)
            ]
            return th.cat(flat).detach()

        with self._gradient_hooks.put_back():
            return reduce(th.add, map(of_part, estimates.parts))

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


def _refuse_reentrant_checkpoints(head: th.Tensor) -> None:
    """:raises UnsupportedNetworkError: if derivatives of h with respect to some parameters would be missing"""
    seen, waiting = set(), [head.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():
            raise UnsupportedNetworkError(
                "policy: torch.utils.checkpoint must have use_reentrant=False, since derivatives with respect to given "
                "parameters do not reach those inside a reentrant checkpoint"
            )
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]


@contextmanager
def _uncompiled(policy: ActorCriticPolicy) -> Iterator[None]:
    """Modules that were compiled, in place or by ``torch.compile``, are what they were before."""
    in_place = [(module, module._compiled_call_impl) for module in policy.modules() if module._compiled_call_impl]
    wrapped = [
        (parent._modules, name, child)
        for parent in policy.modules()
        for name, child in parent._modules.items()
        if child is not None and "_orig_mod" in child._modules
    ]
    try:
        for module, _ in in_place:
            module._compiled_call_impl = None
        for children, name, child in wrapped:
            children[name] = child._modules["_orig_mod"]
        yield
    finally:
        for module, compiled in in_place:
            module._compiled_call_impl = compiled
        for children, name, child in wrapped:
            children[name] = child


class _TwiceDifferentiableAttention(TorchFunctionMode):
    """
    Attention by plain matrix products, in this thread only: torch's fused kernels can be differentiated only once.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # torch's own function, with another kernel; asking it for the weights would also avoid the fused one, but
            # yields NaN where all keys are masked
            exchanged = {**vars(F), "scaled_dot_product_attention": _attend}
            own = FunctionType(func.__code__, exchanged, func.__name__, func.__defaults__, func.__closure__)
            own.__kwdefaults__ = func.__kwdefaults__
            return own(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: th.Tensor,
    key: th.Tensor,
    value: th.Tensor,
    attn_mask: th.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> th.Tensor:
    """The arguments and the result of ``F.scaled_dot_product_attention``."""
    if attn_mask is not None and attn_mask.dtype == th.bool:
        # False hides a key; the function below would add the mask to the scores as 0 or 1
        attn_mask = th.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    attend = th.ops.aten._scaled_dot_product_attention_math
    attended: th.Tensor = attend(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    return attended
