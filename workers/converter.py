"""How payloads are written and read: the half of the plugin that clients need too."""

import dataclasses

from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes

from workers.payload_codec import EncryptionCodec
from workers.payload_keys import PayloadKeys


def data_converter(keys: PayloadKeys) -> DataConverter:
    """Pydantic's JSON, encrypted where there are ``keys``."""
    converter = dataclasses.replace(pydantic_data_converter, payload_codec=EncryptionCodec(keys))
    if not keys.encrypt_failures:
        return converter
    return dataclasses.replace(
        converter, failure_converter_class=DefaultFailureConverterWithEncodedAttributes
    )
