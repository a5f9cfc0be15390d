"""
Updates on a GPU equal those on the CPU, and checkpoints move between the two.

    python -m pytest -m gpu -rA tests/test_gpu.py

Tests marked ``gpu`` are skipped where torch sees no CUDA device. Each takes its pair of devices as an argument, and the
others run the same code on the CPU alone. Two models take the same rollouts. The difference of their steps, relative to
the step's norm, may be 1e-8 in float64, and 1e-3 in float32, whose sums depend on their order. Where convolutions round
what they multiply, it may be 0.02 in the actor's first step. ``-rA`` prints what it is.
"""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import NatureCNN

from sb3_uatrpo import UATRPO, MatchedTRPO
from tests.helpers import DICT, LARGE_IMAGE, SmallCombined, collect, logged, make_model, with_extractor
from tests.reference import actor_parameters
from tests.test_user_additions import EXTRACTORS

# SB3's advice for small networks, and torch's note that the first product is in a backward pass's own thread
KNOWN_WARNINGS = ("You are trying to run", "Attempting to run cuBLAS")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in KNOWN_WARNINGS]
PRECISIONS = {"float64": (th.float64, 1e-8), "float32": (th.float32, 1e-3)}


KINDS = {
    "mlp": {},
    # cuDNN's layers cannot be differentiated twice
    "recurrent": with_extractor(EXTRACTORS["recurrent"]),
    "discrete": {"action_space": "discrete"},
    "gsde": {"use_sde": True},
    # a fresh network: with large weights, the activations of a NatureCNN grow from layer to layer
    "cnn": {"observation_space": LARGE_IMAGE, "spread": False, **with_extractor(NatureCNN)},
    "dict": {"action_space": "discrete", "observation_space": DICT, **with_extractor(SmallCombined)},
}
IMAGES = {
    "cnn": spaces.Box(0.0, 1.0, LARGE_IMAGE.shape, np.float32),
    "dict": spaces.Dict({**DICT.spaces, "image": spaces.Box(0.0, 1.0, DICT["image"].shape, np.float32)}),
}
METHODS = {
    "least_squares": (UATRPO, {}),
    "nystrom": (UATRPO, {"projection_solver": "nystrom"}),
    "shrinkage": (UATRPO, {"shrinkage": 0.75, "target_kl": 0.01}),
    # with less damping, conjugate gradients magnify rounding
    "matched_trpo": (MatchedTRPO, {"cg_damping": 1.0}),
}
all_kinds = pytest.mark.parametrize("kind", KINDS)
all_methods = pytest.mark.parametrize("method", METHODS)


def on_gpu(test):
    """Between the CPU and a CUDA device, both ways."""
    without = pytest.mark.skipif(not th.cuda.is_available(), reason="torch sees no CUDA device")
    pairs = pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")], ids="-".join)
    return pytest.mark.gpu(without(pairs(test)))


def model_on(device: str, method: str, kind: str, dtype: th.dtype = th.float64):
    cls, options = METHODS[method]
    options = {**options, **KINDS[kind], "n_envs": 2, "device": device, "double": dtype == th.float64}
    if dtype == th.float64 and kind in IMAGES:
        # Stable-Baselines3 divides by 255 in float32, and a GPU multiplies by 1/255, which rounds otherwise
        options["policy_kwargs"] = {**options["policy_kwargs"], "normalize_images": False}
        options["observation_space"] = IMAGES[kind]
    return make_model(cls, **options)


def parts(model) -> list[th.Tensor]:
    """The parameters of the actor, and those of the critic."""
    assert {param.device.type for param in model.policy.parameters()} == {model.device.type}
    acting = set(actor_parameters(model.policy))
    groups = [[p for p in model.policy.parameters() if (p in acting) == which] for which in (True, False)]
    return [th.cat([p.detach().flatten() for p in group]).cpu().double() for group in groups]


def share_rollout(model, other) -> None:
    collect(model)
    vars(other.rollout_buffer).update({**copy.deepcopy(vars(model.rollout_buffer)), "device": other.device})


def differences(model, other, n_updates: int, rounded: bool = False) -> list[float]:
    """How much updates of the actor, and of the critic, differ between two models, relative to their norms."""
    starts = parts(model)
    assert all(map(th.equal, starts, parts(other)))
    for _ in range(n_updates):
        share_rollout(model, other)
        for each in (model, other):
            # the order of minibatches
            np.random.seed(0)
            with th.backends.cudnn.flags(enabled=True, allow_tf32=rounded):
                each.train()
    ends = zip(starts, parts(model), parts(other), strict=True)
    found = [float((end - others).norm() / (end - start).norm()) for start, end, others in ends]
    print(f"relative differences of actor and critic: {found[0]:.1e} {found[1]:.1e}")
    return found


def check_equal(model, other, tolerance: float) -> None:
    """Two updates differ by no more than ``tolerance``, and draw the same random numbers."""
    assert max(differences(model, other, 2)) <= tolerance
    assert logged(other) == pytest.approx(logged(model), rel=10 * tolerance, abs=tolerance)
    assert str(model.subsample_generator.bit_generator.state) == str(other.subsample_generator.bit_generator.state)
    if isinstance(model, UATRPO):
        assert other.sketch.omega.device.type == other.device.type
        for name in ("omega", "generator", "layout", "ema_weight"):
            assert th.equal(model.sketch.state_dict()[name].cpu(), other.sketch.state_dict()[name].cpu()), name


def check_checkpoint(method: str, kind: str, devices: tuple[str, str], path) -> None:
    model = collect(model_on(devices[0], method, kind))
    model.train()
    model.save(path)
    loaded = type(model).load(path, env=model.env, device=devices[1])
    loaded.set_logger(Logger(folder=None, output_formats=[]))
    check_equal(model, loaded, 1e-8)


@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS.values(), ids=PRECISIONS)
@all_methods
@all_kinds
def test_updates_are_those_of_the_other_device(method, kind, dtype, tolerance, devices):
    check_equal(*(model_on(device, method, kind, dtype) for device in devices), tolerance)


@on_gpu
@all_methods
def test_convolutions_that_cudnn_rounds_hardly_change_a_step(method, devices):
    """By default, it rounds what they multiply to 10 bits. Adam and further updates magnify the difference."""
    actor, _ = differences(*(model_on(device, method, "cnn", th.float32) for device in devices), 1, rounded=True)
    assert actor <= 0.02


@on_gpu
@all_methods
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_checkpoint_goes_on_on_the_other_device(method, kind, devices, tmp_path):
    check_checkpoint(method, kind, devices, tmp_path / "model")


@on_gpu
@pytest.mark.filterwarnings("ignore:The log-probabilities of the rollout differ")
def test_checking_a_changed_rollout_draws_nothing(devices):
    model, other = (model_on(device, "shrinkage", "mlp") for device in devices)
    share_rollout(model, other)
    other.rollout_buffer.log_probs += 1.0
    random_state = th.cuda.get_rng_state if devices[1] == "cuda" else th.get_rng_state
    before = random_state()
    other.train()
    assert other._warned_of_log_probs
    assert th.equal(random_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["shrinkage", "matched_trpo"])
def test_the_default_is_the_gpu_if_there_is_one(method):
    model = model_on("auto", method, "mlp", th.float32)
    assert model.device.type == ("cuda" if th.cuda.is_available() else "cpu")
    model.learn(3 * model.n_steps * model.n_envs)
    assert model._n_updates == 3
    assert all(bool(part.isfinite().all()) for part in parts(model))


@all_kinds
def test_equal_devices_differ_by_nothing(kind, tmp_path):
    check_equal(*(model_on("cpu", "shrinkage", kind) for _ in range(2)), 0.0)
    check_checkpoint("shrinkage", kind, ("cpu", "cpu"), tmp_path / "model")


@all_methods
@pytest.mark.parametrize(("attribute", "value"), [("normalize_advantage", False), ("n_critic_updates", 4)])
def test_a_difference_is_found(method, attribute, value):
    models = [model_on("cpu", method, "mlp") for _ in range(2)]
    setattr(models[1], attribute, value)
    with pytest.raises(AssertionError, match=r"<= 0.001"):
        check_equal(*models, 0.001)
