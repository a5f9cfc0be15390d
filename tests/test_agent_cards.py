"""The agents in docs/agents, read as somebody does who gets them from the Hugging Face Hub."""

import json
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from huggingface_hub import ModelCard

from sb3_uatrpo import UATRPO

CARDS = sorted(Path(__file__).parents[1].glob("docs/agents/*/*_1/README.md"))
assert CARDS
every_agent = pytest.mark.parametrize("path", CARDS, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")


@every_agent
def test_metadata_text_and_overview_have_the_same_results(path):
    task = path.parts[-2].removesuffix("_1")
    card, results = ModelCard.load(path), json.loads((path.parent / "results.json").read_text(encoding="utf-8"))
    assert (card.data.model_name, card.data.library_name, card.data.license) == ("UATRPO", "stable-baselines3", "mit")
    assert {task, "reinforcement-learning"} < set(card.data.tags)
    (evaluation,) = card.data.eval_results
    assert (evaluation.task_type, evaluation.dataset_type) == ("reinforcement-learning", task)
    mean, deviation, number = (results[key] for key in ("mean_reward", "std_reward", "n_eval_episodes"))
    assert (evaluation.metric_type, evaluation.metric_value) == ("mean_reward", f"{mean:.2f} +/- {deviation:.2f}")
    text = f"| {mean:,.0f} ± {deviation:,.0f} |"
    assert f"return over {number} deterministic episodes, environment seed 2000000 {text}" in card.text
    row = f"| {task} | [{path.parts[-3]}]({'/'.join(path.parts[-3:])}) {text}"
    assert row in (path.parents[2] / "README.md").read_text(encoding="utf-8")


@every_agent
def test_the_replay_is_a_small_video_that_moves(path):
    video = path.with_name("replay.mp4")
    with iio.imopen(video, "r") as file:
        metadata = file.metadata()
        seconds = [file.read(index=round(i * metadata["fps"])).astype(int) for i in range(int(metadata["duration"]))]
    assert np.abs(np.diff(seconds, axis=0)).mean(axis=(1, 2, 3)).min() > 1  # none in a single second
    assert video.stat().st_size < 300_000


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 2 saved these agents")
@every_agent
def test_the_agent_loads_without_an_environment(path):
    model = UATRPO.load(path.parent / f"{path.parts[-2].removesuffix('_1')}.zip", device="cpu")
    action, _ = model.predict(np.zeros(model.observation_space.shape), deterministic=True)
    assert model.action_space.contains(action)
