"""Encrypts payloads before they leave for Temporal, and decrypts what comes from there.

AES-256-GCM: a fresh nonce of 12 bytes, then the payload's serialized message with its tag. The id
of the key is authenticated with it and stands in the clear beside it: so keys can be replaced.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

from models.errors import ConfigurationError
from workers.payload_keys import KEYS, KEYS_FILE, PayloadKeys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ENCODING = b"binary/encrypted"
CIPHER = b"AES-256-GCM"
ENCODING_FIELD, CIPHER_FIELD, KEY_FIELD = "encoding", "encryption-cipher", "encryption-key-id"
NONCE_BYTES = 12


class EncryptionCodec(PayloadCodec):
    """Encrypts under the first of ``keys``; without keys only refuses what is encrypted.

    What is not encrypted passes: a stock client may have sent it, or the run is older than the
    keys.
    """

    def __init__(self, keys: PayloadKeys) -> None:
        self._keys = keys

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Every payload encrypted, or as it is without keys."""
        current = self._keys.current
        if current is None:
            return list(payloads)
        return [self._encrypted(payload, current) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Every payload in the clear.

        Raises:
            ConfigurationError: this process lacks its key, has another under that id, or the
                payload was changed.
        """
        return [
            self._decrypted(payload)
            if payload.metadata.get(ENCODING_FIELD) == ENCODING
            else payload
            for payload in payloads
        ]

    def _encrypted(self, payload: Payload, key_id: str) -> Payload:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[key_id].encrypt(nonce, payload.SerializeToString(), key_id.encode())
        metadata = {ENCODING_FIELD: ENCODING, CIPHER_FIELD: CIPHER, KEY_FIELD: key_id.encode()}
        return Payload(metadata=metadata, data=nonce + sealed)

    def _decrypted(self, payload: Payload) -> Payload:
        from cryptography.exceptions import InvalidTag

        cipher = payload.metadata.get(CIPHER_FIELD, CIPHER)
        if cipher != CIPHER:
            raise ConfigurationError(f"a payload is encrypted with {cipher!r}, not by Perdure")
        key_id = payload.metadata.get(KEY_FIELD, b"").decode(errors="replace")
        known = self._ciphers.get(key_id)
        if known is None:
            has = ", ".join(self._keys.keys) or "none"
            raise ConfigurationError(
                f"a payload is encrypted with key {key_id!r}, this process has {has}: give it that "
                f"key in {KEYS_FILE} (or {KEYS}), behind the one that encrypts"
            )
        nonce, sealed = payload.data[:NONCE_BYTES], payload.data[NONCE_BYTES:]
        try:
            return Payload.FromString(known.decrypt(nonce, sealed, key_id.encode()))
        except (InvalidTag, ValueError, DecodeError) as error:
            raise ConfigurationError(
                f"key {key_id!r} does not open a payload: this process holds another key under "
                "that id, or the payload was changed"
            ) from error

    @cached_property
    def _ciphers(self) -> dict[str, "AESGCM"]:
        # Loaded at the first use: most clients neither encrypt nor decrypt.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return {key_id: AESGCM(key) for key_id, key in self._keys.keys.items()}
