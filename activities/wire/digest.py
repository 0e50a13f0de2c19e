"""The weight digest: one string that names the bytes of every tensor of a policy version."""

import hashlib
from collections.abc import Mapping


def weights_digest(checksums: Mapping[str, str]) -> str:
    r"""SHA-256 hex over the sorted lines ``<Hugging Face name> <xxh3_64 hex>\n``.

    The trainer computes ``checksums`` from what it exports and an engine from its live tensors, so
    equal digests mean equal weights. Order of the mapping does not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name} {checksums[name]}\n".encode())
    return digest.hexdigest()
