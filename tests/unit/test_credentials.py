"""A run file holds no credentials: they are refused, and no message shows one."""

from pathlib import Path

import pytest

from configs.credentials import credentials_in, names_credential, without_credentials
from configs.load import load_run
from models.errors import ConfigurationError

CANARY = "canary7Hq2xT9"
MINIMAL = """
schema_version = 1
name = "x"
[model]
source = "tiny"
[model.tiny]
[[data.tasks]]
task = "reverse_word"
train_count = 64
[output]
root = "out"
[training]
num_rollouts = 2
rollout_batch_size = 2
samples_per_prompt = 2
[evaluation]
"""


def refusal(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_run(path, overrides)
    return refused.value.message


def test_the_rest_of_the_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MINIMAL)
    load_run(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f'data.tasks=[{{task="reverse_word", train_count=64, prompt_suffix="hf_{CANARY}xyz"}}]',
         "data.tasks[0].prompt_suffix"),
        (f'output.root="s3://me:{CANARY}@bucket/x"', "output.root"),
        (f'tracking.wandb_entity="https://w.example/?api_key={CANARY}"', "tracking.wandb_entity"),
        (f'tracking.wandb_project="Bearer {CANARY}"', "tracking.wandb_project"),
        (f'launch.env.MIRROR="https://me:{CANARY}@mirror"', "launch.env.MIRROR"),
        (f'launch.env.EXTRA="sk-{CANARY}{CANARY}"', "launch.env.EXTRA"),
    ],
)  # fmt: skip
def test_a_value_that_looks_like_a_credential_is_refused(
    tmp_path: Path, override: str, key: str
) -> None:
    message = refusal(tmp_path, MINIMAL, override)
    assert f"{key}: holds what looks like a credential" in message
    assert "workers in their environment" in message
    assert CANARY not in message


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "TOKEN", "DB_PASSWORD", "MY_SECRET"])
def test_a_variable_that_is_called_like_one_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, MINIMAL + f'[launch.env]\n{name} = "{CANARY}"\n')
    assert name in message
    assert CANARY not in message


@pytest.mark.parametrize(
    "override",
    [
        f'tracking.wandb_api_key="{CANARY}"',
        f"tracking.wandb_api_key={CANARY}",
        f'model.source="https://me:{CANARY}@hub/model"',
        f'Data.x="https://me:{CANARY}@hub/model"',
        f'name="https://me:{CANARY}@hub/model"',
    ],
)
def test_no_message_shows_a_credential(tmp_path: Path, override: str) -> None:
    assert CANARY not in refusal(tmp_path, MINIMAL, override)


def test_ordinary_values_are_none() -> None:
    for text in (
        "s3://bucket/prompts.jsonl",
        "https://host:8080/x?page=2",
        "What is 3 * 4? Give the number only.",
        "/data/models/Qwen3-0.6B",
        "expandable_segments:True",
        "eos token",
    ):
        assert not list(credentials_in({"key": [text]})), text
        assert without_credentials(text) == text
    for name in ("MAX_TOKENS", "OMP_NUM_THREADS", "max_new_tokens", "num_tokens"):
        assert not names_credential(name)
