import pytest

from configs.overrides import apply_overrides, parse_override
from models.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("name='x'", ("name",), "x"),
        ('name="a=b"', ("name",), "a=b"),
        ("core.max_run_seconds = 3.5", ("core", "max_run_seconds"), 3.5),
        ("optimizer.learning_rate=1e-3", ("optimizer", "learning_rate"), 1e-3),
        ("training.use_tis=true", ("training", "use_tis"), True),
        ("training.num_rollouts=1_000", ("training", "num_rollouts"), 1000),
        ("launch.env.HF_HOME='/x'", ("launch", "env", "HF_HOME"), "/x"),
        ("data.tasks=[{task='reverse_word'}]", ("data", "tasks"), [{"task": "reverse_word"}]),
    ],
)
def test_values_are_toml(text: str, path: tuple[str, ...], value: object) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model.source=tiny", "quote text as in --set 'model.source=\"tiny\"'"),
        ("output.root='x' y", "quote text as in --set 'output.root=\"x y\"'"),
        ("training.use_tis=yes", "leave numbers, true and false bare"),
        ("training.use_tis=True", "'True' is not a TOML value; write true"),
        ("async.fully_async=FALSE", "'FALSE' is not a TOML value; write false"),
        ("core.max_policy_lag=None", "take the key out of the file to get its default"),
        ("async.max_requeues=null", "take the key out of the file to get its default"),
        ("training.num_rollouts=", "is not a TOML value"),
        ("training.num_rollouts=1\ncore.x=2", "is not a TOML value"),
        ("training.num_rollouts", "write table.key=VALUE"),
        ("Training.num_rollouts=1", "is not a key"),
        ("training..x=1", "is not a key"),
        ("data.tasks.0.task='x'", "is not a key"),
        ("core.HF_HOME='x'", "is not a key"),
        ("launch.env.A.B='x'", "is not a key"),
        ("=1", "is not a key"),
    ],
)
def test_malformed_overrides_say_why(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_override(text)
    assert caught.value.message.startswith(f"--set {text}")
    assert reason in caught.value.message


def test_the_last_one_wins_and_the_document_is_untouched() -> None:
    document = {"core": {"max_policy_lag": 0}, "name": "a"}
    changed = apply_overrides(document, ["core.max_policy_lag=1", "core.max_policy_lag=2"])
    assert changed == {"core": {"max_policy_lag": 2}, "name": "a"}
    assert document == {"core": {"max_policy_lag": 0}, "name": "a"}


def test_missing_tables_are_made_and_lists_are_not_entered() -> None:
    assert apply_overrides({}, ["a.b.c=1"]) == {"a": {"b": {"c": 1}}}
    with pytest.raises(ConfigurationError, match=r"a\.b is not a table"):
        apply_overrides({"a": {"b": [1]}}, ["a.b.c=1"])
