"""Encryption of payloads: the cipher, keys and their rotation, what is said when one is missing."""

from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload

from models.errors import ConfigurationError
from workers.converter import data_converter
from workers.payload_codec import EncryptionCodec
from workers.payload_keys import PayloadKeys, payload_keys

ciphers = pytest.importorskip(
    "cryptography.hazmat.primitives.ciphers.aead", reason="cryptography is not installed"
)

OLD, NEW = "0f" * 32, "a1" * 32
CLEAR = Payload(metadata={"encoding": b"json/plain"}, data=b'{"root": "/canary"}')


def codec(**keys: str) -> EncryptionCodec:
    return EncryptionCodec(PayloadKeys({name: bytes.fromhex(key) for name, key in keys.items()}))


async def test_what_leaves_is_sealed_with_aes_gcm_under_the_named_key() -> None:
    (sealed,) = await codec(new=NEW).encode([CLEAR])

    assert dict(sealed.metadata) == {
        "encoding": b"binary/encrypted",
        "encryption-cipher": b"AES-256-GCM",
        "encryption-key-id": b"new",
    }
    assert b"canary" not in sealed.SerializeToString()
    # Opened by the library alone: nonce of 12 bytes, the id of the key authenticated.
    opened = ciphers.AESGCM(bytes.fromhex(NEW)).decrypt(sealed.data[:12], sealed.data[12:], b"new")
    assert Payload.FromString(opened) == CLEAR


async def test_every_payload_has_its_own_nonce() -> None:
    sealed = await codec(new=NEW).encode([CLEAR] * 50)
    assert len({each.data[:12] for each in sealed}) == 50


async def test_keys_are_replaced_one_after_the_other() -> None:
    (old,) = await codec(old=OLD).encode([CLEAR])
    rotating = codec(new=NEW, old=OLD)
    (new,) = await rotating.encode([CLEAR])

    assert new.metadata["encryption-key-id"] == b"new"
    assert await rotating.decode([old, new, CLEAR]) == [CLEAR, CLEAR, CLEAR]


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({}, "key 'old', this process has none"),
        ({"new": NEW}, "key 'old', this process has new"),
        ({"old": NEW}, "key 'old' does not open"),
    ],
)
async def test_a_missing_or_wrong_key_is_named(mine: dict[str, str], said: str) -> None:
    sealed = await codec(old=OLD).encode([CLEAR])
    with pytest.raises(ConfigurationError, match=said):
        await codec(**mine).decode(sealed)


@pytest.mark.parametrize("position", [0, 12, -1])
async def test_a_changed_payload_is_refused(position: int) -> None:
    (sealed,) = await codec(old=OLD).encode([CLEAR])
    data = bytearray(sealed.data)
    data[position] ^= 1
    changed = Payload(metadata=dict(sealed.metadata), data=bytes(data))
    with pytest.raises(ConfigurationError, match="does not open"):
        await codec(old=OLD).decode([changed])


async def test_a_payload_cannot_be_passed_off_as_another_keys() -> None:
    (sealed,) = await codec(old=OLD).encode([CLEAR])
    sealed.metadata["encryption-key-id"] = b"other"
    with pytest.raises(ConfigurationError, match="does not open"):
        await codec(other=OLD).decode([sealed])


async def test_without_keys_nothing_is_encrypted() -> None:
    assert await codec().encode([CLEAR]) == [CLEAR]


def test_keys_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# the newest first\nnew:{NEW}\n\nold:{OLD}\n")

    of_file = payload_keys({"PERDURE_PAYLOAD_KEYS_FILE": str(path)})

    assert of_file == payload_keys({"PERDURE_PAYLOAD_KEYS": f"new:{NEW},old:{OLD}"})
    assert of_file.current == "new"
    assert OLD not in repr(of_file)
    assert payload_keys({}).current is None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"PERDURE_PAYLOAD_KEYS": "new:abc"}, "entry 1 is no payload key"),
        ({"PERDURE_PAYLOAD_KEYS": NEW}, "entry 1 is no payload key"),
        ({"PERDURE_PAYLOAD_KEYS": f"new:{NEW},new:{OLD}"}, "'new' is there twice"),
        ({"PERDURE_PAYLOAD_KEYS": "#"}, "holds no payload key"),
        ({"PERDURE_PAYLOAD_KEYS_FILE": "/nowhere/keys"}, "/nowhere/keys cannot be read"),
        ({"PERDURE_PAYLOAD_KEYS": f"a:{NEW}", "PERDURE_PAYLOAD_KEYS_FILE": "x"}, "both set"),
        ({"PERDURE_PAYLOAD_ENCRYPT_FAILURES": "yes"}, "neither 0 nor 1"),
        ({"PERDURE_PAYLOAD_ENCRYPT_FAILURES": "1"}, "needs keys"),
    ],
)
def test_keys_that_are_none_are_refused_and_never_shown(told: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        payload_keys(told)
    assert NEW not in refused.value.message


async def test_messages_of_failures_are_encrypted_on_request() -> None:
    from temporalio.api.failure.v1 import Failure
    from temporalio.exceptions import ApplicationError

    for wish, shown in ((False, True), (True, False)):
        converter = data_converter(PayloadKeys({"new": bytes.fromhex(NEW)}, wish))
        failure = Failure()
        await converter.encode_failure(ApplicationError("canary", type="Kind"), failure)
        assert (b"canary" in failure.SerializeToString()) is shown
        assert failure.application_failure_info.type == "Kind"
        assert "canary" in str(await converter.decode_failure(failure))


def test_a_stack_with_other_keys_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.local_stack.client import _refuse_unmet
    from workers.local_stack.state import StackInfo

    for name in ("RAY_ADDRESS", "PERDURE_TEMPORAL_PORT", "PERDURE_TEMPORAL_UI_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PERDURE_RAY_PORT", raising=False)
    info = StackInfo(
        temporal_address="127.0.0.1:1",
        temporal_ui="http://127.0.0.1:2",
        ray_address="127.0.0.1:3",
        state_dir=str(tmp_path),
        payload_key_ids=("old",),
    )
    monkeypatch.setenv("PERDURE_PAYLOAD_KEYS", f"new:{NEW},old:{OLD}")
    with pytest.raises(ConfigurationError, match=r"here: new, old; those of the embedded.*: old"):
        _refuse_unmet(info)
    monkeypatch.setenv("PERDURE_PAYLOAD_KEYS", f"old:{OLD}")
    _refuse_unmet(info)
