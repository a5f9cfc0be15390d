"""What docs/stable_baselines3.md says of a saved model that comes from somebody else."""

import base64
import io
import json
import zipfile

import cloudpickle
import pytest
import torch as th

from sb3_uatrpo import UATRPO
from tests.helpers import BOTH, assert_same, model_on


class Executed(Exception):
    pass


class Payload:
    """Executes something when it is unpickled."""

    def __reduce__(self):
        return exec, ("from tests.test_security import Executed; raise Executed",)


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


@BOTH
def test_load_executes_what_is_in_a_file_and_set_parameters_does_not(cls, hostile):
    model = model_on(cls, "CartPole-v1").learn(32)
    file = hostile(model)
    with pytest.raises(Executed):
        cls.load(file)
    other = model_on(cls, "CartPole-v1")
    other.set_parameters(file, device="cpu")
    assert_same(model, other)


def test_the_sketch_in_a_file_is_plain_tensors(tmp_path):
    model_on(UATRPO, "CartPole-v1").learn(32).save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as saved:
        sketch = th.load(io.BytesIO(saved.read("sketch.pth")), weights_only=True)
    assert {type(value) for value in sketch.values()} == {th.Tensor}
