"""Rollout buffer → critic: epochs of minibatch regression on the returns, which do not change the actor."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs
from torch.nn import functional as F
from torch.optim import optimizer as th_optimizer

from sb3_uatrpo.batch import each, rows_of
from sb3_uatrpo.hooks import GradientHooks
from sb3_uatrpo.plain_mlp import FastPath, PlainMLP, as_arrays, same_but_for_rounding, size_of_terms
from sb3_uatrpo.storage import is_sb3s_own

#: The features of this many bytes, or of one minibatch if they are more, are computed at once.
FEATURE_BYTES = 16 * 2**20


def fit_values(
    policy: ActorCriticPolicy,
    rollout_buffer: RolloutBuffer,
    batch_size: int,
    n_epochs: int,
    actor_params: tuple[th.Tensor, ...],
    fast_path: FastPath,
) -> list[float]:
    """
    Minimise the mean of (V(s_i) - R_i)² over minibatches of the rollout, with the policy's optimizer.

    A minibatch whose loss or gradient is not finite is skipped, with a warning.

    :param policy: left in training mode
    :param rollout_buffer: a full buffer; its ``get`` yields the minibatches
    :param batch_size: steps in a minibatch
    :param n_epochs: passes over the rollout
    :param actor_params: parameters that the actor depends on; those that it shares with the critic are not changed
    :param fast_path: decides whether the gradients of a plain MLP are computed without a graph
    :return: the loss of each minibatch that was not skipped
    """
    policy.set_training_mode(True)
    acting = set(actor_params)
    params = [param for param in policy.parameters() if param.requires_grad and param not in acting]
    losses: list[float] = []
    policy.optimizer.zero_grad()
    for param in policy.parameters():
        # An optimizer neither moves nor decays a parameter without a gradient, and some keep zeros in zero_grad
        param.grad = None
    if not params or n_epochs == 0:
        return losses
    general = _GraphGradients(policy, params)
    gradients: _GraphGradients | _ArrayGradients = general
    on_arrays = _ArrayGradients.of(policy, rollout_buffer, params)
    if on_arrays is not None and fast_path.is_proven(on_arrays.differences(general, rollout_buffer, batch_size)):
        gradients = on_arrays
    with _fused_adam(policy.optimizer):
        for _ in range(n_epochs):
            for loss in gradients.epoch(rollout_buffer, batch_size):
                if math.isfinite(loss):
                    policy.optimizer.step()
                    losses.append(loss)
                else:
                    warnings.warn(
                        "The update of the critic skipped a minibatch whose loss or gradient is not finite.",
                        stacklevel=2,
                    )
    return losses


class _GraphGradients:
    """
    Gradients by autograd, for any policy. ``epoch`` yields the loss of each minibatch, with its gradient in the
    parameters, or NaN if one of them is not finite.
    """

    def __init__(self, policy: ActorCriticPolicy, params: Sequence[th.Tensor]) -> None:
        self._policy = policy
        self.params = params

    def epoch(self, rollout_buffer: RolloutBuffer, batch_size: int) -> Iterator[float]:
        for samples in rollout_buffer.get(batch_size):
            loss, gradients = self.at(samples.observations, samples.returns)
            # One check for all: the sum is not finite if any of its terms is not
            total = th.stack([loss, *(gradient.sum() for gradient in gradients if gradient is not None)]).sum()
            if math.isfinite(total.item()):
                for param, gradient in zip(self.params, gradients, strict=True):
                    param.grad = None if gradient is None else _laid_out_as(param, gradient)
                    for hook in _accumulation_hooks(param) if gradient is not None else ():
                        hook(param)
                yield loss.item()
            else:
                yield math.nan

    def at(self, observations: PyTorchObs, returns: th.Tensor) -> tuple[th.Tensor, tuple[th.Tensor | None, ...]]:
        """The loss, and its gradient for each parameter that it depends on."""
        loss = F.mse_loss(self._policy.predict_values(observations).flatten(), returns)
        if not loss.requires_grad:
            # a critic that is frozen or has no parameters, while something else is trained
            return loss, (None,) * len(self.params)
        return loss.detach(), th.autograd.grad(loss, self.params, allow_unused=True)


class _ArrayGradients:
    """The same for a plain MLP, computed in NumPy on the memory of the parameters."""

    def __init__(self, mlp: PlainMLP) -> None:
        self._mlp = mlp
        self._params = mlp.critic_params
        self._sizes = [param.numel() for param in self._params]
        self._flat = np.zeros(sum(self._sizes), np.float32)
        parts = np.split(self._flat, np.cumsum(self._sizes)[:-1])
        self._gradients = [part.reshape(tuple(param.shape)) for part, param in zip(parts, self._params, strict=True)]
        self._make_views()

    @staticmethod
    def of(
        policy: ActorCriticPolicy, rollout_buffer: RolloutBuffer, params: Sequence[th.Tensor]
    ) -> "_ArrayGradients | None":
        """None unless everything between the buffer and the optimizer is Stable-Baselines3's own, on a plain MLP."""
        mlp = PlainMLP.recognise(policy)
        if (
            mlp is None
            or not mlp.runs_on_arrays
            or set(params) != set(mlp.critic_params)
            or len(params) != len(mlp.critic_params)
            or GradientHooks(policy)
            or any(True for param in params for _ in _accumulation_hooks(param))
            or not is_sb3s_own(rollout_buffer, "get", "_get_samples", "to_torch")
        ):
            return None
        found = _ArrayGradients(mlp)
        return found if all(layer.slope is not None for layer in found._critic.layers) else None

    def _make_views(self) -> None:
        self._addresses = [param.data_ptr() for param in self._params]
        self._critic = as_arrays(self._mlp.critic)

    def epoch(self, rollout_buffer: RolloutBuffer, batch_size: int) -> Iterator[float]:
        # one call for all steps draws the same order as one for minibatches, and gathers only once
        samples = next(iter(rollout_buffer.get(None)))
        for features, returns in self._minibatches(samples.observations, samples.returns.numpy(), batch_size):
            loss = self.at(features, returns)
            if math.isfinite(loss):
                # a copy, since optimizers and their hooks may keep gradients, replace them or write into them
                flat = th.from_numpy(self._flat.copy())
                for param, gradient in zip(self._params, flat.split(self._sizes), strict=True):
                    param.grad = gradient.view_as(param)
            yield loss

    def _minibatches(
        self, observations: PyTorchObs, returns: np.ndarray, batch_size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Features and returns. Those of several minibatches are computed at once, as far as memory allows."""
        n_bytes = batch_size * self._mlp.critic[0].weight[0].nbytes
        rows_at_once = batch_size * max(1, FEATURE_BYTES // n_bytes)
        for first in range(0, len(returns), rows_at_once):
            rows = slice(first, first + rows_at_once)
            features, targets = self._mlp.features(rows_of(observations, rows)).numpy(), returns[rows]
            for start in range(0, len(targets), batch_size):
                yield features[start : start + batch_size], targets[start : start + batch_size]

    @np.errstate(all="ignore")
    def at(self, features: np.ndarray, returns: np.ndarray) -> float:
        """The loss, or NaN if it or its gradient is not finite; the gradient overwrites the previous one."""
        # some optimizers replace the memory of a parameter, and the arrays are views of it
        if [param.data_ptr() for param in self._params] != self._addresses:
            self._make_views()
        loss = self._critic.squared_error(features, returns, self._gradients)
        # one check for all, as in _GraphGradients.epoch
        return loss if math.isfinite(loss + float(self._flat.sum())) else math.nan

    @np.errstate(all="ignore")
    def differences(self, general: _GraphGradients, rollout_buffer: RolloutBuffer, batch_size: int) -> list[str]:
        """
        Names of the quantities that differ from autograd's by more than rounding, at some observations of the rollout.

        Every target is below its value by the same amount, so all errors have one sign. With real targets, errors may
        cancel in the gradient and leave only rounding to compare.
        """
        observations = _first_observations(rollout_buffer, batch_size)
        with th.no_grad():
            values = self._mlp.policy.predict_values(observations).flatten()
            features = self._mlp.features(observations).numpy()
            # values may be close to zero, as without rewards, but their rounding errors need not be
            terms = size_of_terms(self._mlp.critic, th.from_numpy(features))
        targets = values - 1.0 - values.abs().amax()
        self.at(features, targets.numpy())
        gradients = general.at(observations, targets)[1]
        expected: dict[th.Tensor, Any] = dict(zip(general.params, gradients, strict=True))
        compared: dict[str, tuple[Any, ...]] = {
            "the values": (th.from_numpy(self._critic(features)).flatten(), values, terms),
            "the critic's gradient": (
                th.cat([th.from_numpy(gradient).flatten() for gradient in self._gradients]),
                th.cat([expected[param].flatten() for param in self._params]),
            ),
        }
        return [name for name, outputs in compared.items() if not same_but_for_rounding(*outputs)]


def _first_observations(rollout_buffer: RolloutBuffer, n_rows: int) -> Any:
    """The first observations of a buffer, flattened or not, in the form that the policy takes."""

    def first(array: np.ndarray) -> th.Tensor:
        # not -1, which is undefined for arrays without elements
        n_total = rollout_buffer.buffer_size * rollout_buffer.n_envs
        rows = array if rollout_buffer.generator_ready else array.reshape(n_total, *array.shape[2:])
        return th.as_tensor(rows[:n_rows], device=rollout_buffer.device)

    return each(first, rollout_buffer.observations)


def _accumulation_hooks(param: th.Tensor) -> Iterable[Callable[[th.Tensor], None]]:
    """The hooks that torch calls after ``backward()`` has added to ``param.grad``; ``autograd.grad`` calls none."""
    return (param._post_accumulate_grad_hooks or {}).values()


def _laid_out_as(param: th.Tensor, gradient: th.Tensor) -> th.Tensor:
    """The gradient with the strides of the parameter, since optimizers may run through both in memory order."""
    return gradient if gradient.stride() == param.stride() else th.empty_like(param).copy_(gradient)


@contextmanager
def _fused_adam(optimizer: th.optim.Optimizer) -> Iterator[None]:
    """
    Within this context, Adam and AdamW on the CPU use their fused implementation, unless the user has chosen another.

    It updates all parameters in one call, computes the same numbers up to rounding, and has the same state in a
    checkpoint. It runs through memory, so a parameter, its gradient and its state must have the same memory layout:
    gradients get the layout of the parameter, and parameters and state have to be contiguous. An optimizer with step
    hooks is left alone, because the hooks would see the changed setting.
    """
    groups = optimizer.param_groups
    is_adam = type(optimizer) in (th.optim.Adam, th.optim.AdamW)
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        th_optimizer._global_optimizer_pre_hooks,
        th_optimizer._global_optimizer_post_hooks,
    )
    chosen = (is_adam and not any(hooks)) and all(
        group["fused"] is None
        and group["foreach"] is None
        and not (group["capturable"] or group["differentiable"])
        and all(param.device.type == "cpu" and param.is_floating_point() for param in group["params"])
        and all(
            tensor.is_contiguous()
            for param in group["params"]
            for tensor in (param, *optimizer.state.get(param, {}).values())
            if isinstance(tensor, th.Tensor)
        )
        for group in groups
    )
    if not chosen:
        yield
        return
    try:
        for group in groups:
            group["fused"] = True
        yield
    finally:
        for group in groups:
            group["fused"] = None
