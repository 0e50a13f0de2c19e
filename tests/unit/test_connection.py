import pytest

from models.errors import ConfigurationError, ServiceUnreachable
from workers.connection import connect


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("no-such-host.invalid:7233", "failed to lookup address"),
    ],
)
async def test_a_server_that_is_not_there_is_told_in_plain_words(address: str, reason: str) -> None:
    with pytest.raises(ServiceUnreachable) as caught:
        await connect(address)
    assert caught.value.message.startswith(f"Temporal at {address} does not answer: {reason}")
    assert "tonic" not in caught.value.message


async def test_an_unknown_profile_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_PROFILE", "nobody")
    with pytest.raises(ConfigurationError, match="nobody"):
        await connect()
