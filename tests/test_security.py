"""What docs/stable_baselines3.md says of a saved model that comes from somebody else."""

import base64
import io
import json
import zipfile

import cloudpickle
import pytest
import torch as th

from sb3_uatrpo import UATRPO, MatchedTRPO


class Executed(Exception):
    pass


class Payload:
    """Executes something when it is unpickled."""

    def __reduce__(self):
        return exec, ("from tests.test_security import Executed; raise Executed",)


def small(cls):
    return cls("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, device="cpu")


@pytest.fixture
def hostile(tmp_path):
    """Puts a payload into the settings of a saved model."""

    def write(model):
        model.save(tmp_path / "model.zip")
        with zipfile.ZipFile(tmp_path / "model.zip") as saved, zipfile.ZipFile(tmp_path / "hostile.zip", "w") as file:
            for name in saved.namelist():
                content = saved.read(name)
                if name == "data":
                    payload = base64.b64encode(cloudpickle.dumps(Payload())).decode()
                    content = json.dumps({**json.loads(content), "extra": {":serialized:": payload}})
                file.writestr(name, content)
        return tmp_path / "hostile.zip"

    return write


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_load_executes_what_is_in_a_file_and_set_parameters_does_not(cls, hostile):
    model = small(cls).learn(32)
    file = hostile(model)
    with pytest.raises(Executed):
        cls.load(file)
    other = small(cls)
    other.set_parameters(file, device="cpu")
    assert all(map(th.equal, model.policy.state_dict().values(), other.policy.state_dict().values()))


def test_the_sketch_in_a_file_is_plain_tensors(tmp_path):
    small(UATRPO).learn(32).save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as saved:
        sketch = th.load(io.BytesIO(saved.read("sketch.pth")), weights_only=True)
    assert {type(value) for value in sketch.values()} == {th.Tensor}
