"""A plain MLP policy as two chains of layers on the memory of its parameters."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th

from sb3_uatrpo.core.array_mlp import IDENTITY, Array, ArrayMLP
from sb3_uatrpo.core.layers import Layer

#: Numbers in a network's ∂h/∂z that cost next to nothing.
_SMALL = 4096
#: An actor of at most so many weights is updated by one torch thread. On two idle cores, two threads took 1.9 to 17
#: times as long with widths of 64 to 256 (benchmarks/measure_threads.py at commit fa34c10), and 1.7 to 2.1 times with
#: 512, where eight threads of a larger machine took half as long as one (docs/performance.md).
ONE_THREAD_WEIGHTS = 2**17
#: The logit of a choice that a mask forbids, as in sb3-contrib: its probability is zero in floats.
FORBIDDEN = -1e8
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class PlainMLP:
    """
    The layers of a plain MLP policy, as ``plain.as_plain_mlp`` finds them. The arrays share the memory of its
    parameters.

    :param actor: from the features to the Gaussian's means or to the logits
    :param critic: from the features to the value
    :param actor_params: the parameters of the actor's layers, and log σ of a Gaussian
    :param critic_params: the parameters of the critic's layers, in the order of its gradients
    :param log_std: log σ, shape ``(action_dim,)``; None for discrete actions
    :param action_shape: shape of one action
    :param places: where the modules keep all these parameters, with the ``addresses`` of their memory
    :param halves: -½ for each output of the actor
    """

    actor: ArrayMLP
    critic: ArrayMLP
    actor_params: tuple[th.Tensor, ...]
    critic_params: tuple[th.Tensor, ...]
    log_std: Array | None
    action_shape: tuple[int, ...]
    places: tuple[tuple[dict[str, Any], str], ...]
    addresses: list[int]
    halves: Array

    def is_current(self) -> bool:
        """
        :return: whether the parameters and their memory are those that the arrays share. Numbers that change in place
            are seen anyway; a module that was exchanged is not noticed.
        """
        try:
            return list(map(th.Tensor.data_ptr, [table[name] for table, name in self.places])) == self.addresses
        except (KeyError, TypeError):
            # a parameter is gone, as with pruning, or None stands in its place
            return False

    @np.errstate(all="ignore")
    def act(self, observations: Array, action_masks: Any = None) -> tuple[th.Tensor, th.Tensor, th.Tensor] | None:
        """
        Act, by the torch calls that draw the same random numbers as the policy's distribution.

        :param observations: of one timestep in all environments
        :param action_masks: false or zero for each choice that is forbidden
        :return: actions, values and log-probabilities, as the policy's ``forward`` returns them; None if they are not
            finite, so that torch may raise its error
        """
        features = self.features(observations)
        values, outputs = self.critic(features), self.actor(features)
        if self.log_std is None:
            if action_masks is not None:
                if not math.isfinite(np.add.reduce(outputs, axis=None)):
                    return None
                outputs[~np.asarray(action_masks, bool).reshape(outputs.shape)] = FORBIDDEN
            outputs -= outputs.max(axis=1, keepdims=True)
            weights = np.exp(outputs)
            totals = weights.sum(axis=1, keepdims=True)
            if not math.isfinite(np.add.reduce(totals, axis=None)):
                return None
            choices = th.multinomial(th.from_numpy(weights / totals), 1, True)
            log_probs = np.take_along_axis(outputs, choices.numpy(), axis=1) - np.log(totals)
            return choices[:, 0], th.from_numpy(values), th.from_numpy(log_probs[:, 0])
        std = np.exp(self.log_std)
        # sums of squares are not finite if one of their terms is not
        if not math.isfinite(np.vdot(outputs, outputs) + std.dot(std)):
            return None
        actions = np.empty_like(outputs)
        th.from_numpy(actions).normal_()
        actions *= std
        actions += outputs
        # from the rounded actions, as in torch
        z = actions - outputs
        z /= std
        z *= z
        log_probs = z.dot(self.halves)
        log_probs += 2.0 * self.halves.dot(self.log_std) - len(std) * _HALF_LOG_2PI
        if not math.isfinite(log_probs.dot(log_probs)):
            return None
        actions = actions.reshape(-1, *self.action_shape)
        return th.from_numpy(actions), th.from_numpy(values), th.from_numpy(log_probs)

    def features(self, observations: Any) -> Array:
        """:return: what actor and critic start from, shape ``(n, i)``; observations may be a tensor on the CPU"""
        array = np.asarray(observations)
        return array.reshape(len(array), -1).astype(self.actor.layers[0].weight.dtype, copy=False)

    @property
    def bytes_per_timestep(self) -> int:
        """Bytes that a linearisation keeps of each timestep."""
        return 4 * (self.actor.layers[0].weight.shape[1] + 2 * self.n_outputs)

    @property
    def bytes_of_jacobians(self) -> int:
        """Bytes that ∂h/∂z of all layers takes for one timestep: k numbers per output of each layer."""
        k = len(self.actor.layers[-1].bias) * (1 if self.log_std is None else 2)
        return 4 * k * self.n_outputs

    @property
    def is_fast_by_layers(self) -> bool:
        """
        Whether products layer by layer are faster than those by autograd, or small anyway. For each timestep and column
        they multiply with ∂h/∂z, in addition to the weights.
        """
        return self.bytes_of_jacobians <= 4 * max(_SMALL, self.n_weights)

    @property
    def n_weights(self) -> int:
        """Number of weights of all the actor's layers together."""
        return sum(layer.weight.size for layer in self.actor.layers)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of all the actor's layers together."""
        return sum(len(layer.bias) for layer in self.actor.layers)

    @np.errstate(all="ignore")
    def head(self, observations: Any, action_masks: th.Tensor | None) -> th.Tensor:
        """:return: h of n timesteps, shape ``(n, k)``: means and log σ, or normalised logits"""
        return self._head(self.actor(self.features(observations)), action_masks)

    def _head(self, outputs: Array, action_masks: th.Tensor | None) -> th.Tensor:
        network = th.from_numpy(outputs)
        if self.log_std is None:
            if action_masks is not None:
                network = network.masked_fill(action_masks == 0, FORBIDDEN)
            # H, and so the products, do not depend on a constant that is added to all logits
            return network.log_softmax(dim=1)
        return th.cat([network, th.from_numpy(self.log_std).expand_as(network)], dim=1)

    @np.errstate(all="ignore")
    def linearize(
        self, observations: Any, params: tuple[th.Tensor, ...], action_masks: th.Tensor | None
    ) -> tuple[th.Tensor, tuple[Layer, ...], int | None]:
        """
        :param observations: observations of n timesteps
        :param params: the parameters that make up θ, in the order of their coordinates; others are constants
        :param action_masks: zero for each choice that was forbidden, shape ``(n, k)``
        :return: h, shape ``(n, k)``; the layers from the features to the outputs; and the index of log σ in ``params``
        """
        places = {param: place for place, param in enumerate(params)}
        inputs = self.features(observations)
        outputs = self.actor.outputs(inputs)
        layers = []
        for i, (layer, y) in enumerate(zip(self.actor.layers, outputs, strict=True)):
            weight, bias = (places.get(param) for param in self.actor_params[2 * i : 2 * i + 2])
            slope = None if layer.activation is IDENTITY else th.from_numpy(layer.activation.slope(y))
            if action_masks is not None and y is outputs[-1]:
                # forbidden logits are constants
                slope = (action_masks != 0).to(th.float32)
            layers.append(Layer(weight, bias, th.from_numpy(inputs), th.from_numpy(layer.weight), slope))
            inputs = y
        log_std = None if self.log_std is None else places.get(self.actor_params[-1])
        return self._head(outputs[-1], action_masks), tuple(layers), log_std


@contextmanager
def one_thread_if_small(mlp: PlainMLP | None) -> Iterator[None]:
    """
    Within this context, torch computes with one thread if the network is small: where other processes use the cores,
    threads that wait for each other make an update many times slower. Torch's number of threads is restored afterwards.

    :param mlp: the policy's layers, or None if it is not plain, which changes nothing
    """
    n_threads = th.get_num_threads()
    if mlp is None or n_threads == 1 or mlp.n_weights > ONE_THREAD_WEIGHTS:
        yield
        return
    try:
        th.set_num_threads(1)
        yield
    finally:
        th.set_num_threads(n_threads)
