"""The weight digest is SHA-256 over sorted lines, computed here by hand."""

import hashlib

from activities.wire.digest import weights_digest


def test_the_lines_are_sorted_by_name():
    checksums = {"model.norm.weight": "00ff00ff00ff00ff", "lm_head.weight": "123456789abcdef0"}
    text = b"lm_head.weight 123456789abcdef0\nmodel.norm.weight 00ff00ff00ff00ff\n"
    assert weights_digest(checksums) == hashlib.sha256(text).hexdigest()
    assert weights_digest(dict(reversed(checksums.items()))) == weights_digest(checksums)


def test_every_byte_counts():
    base = {"a": "0" * 16, "b": "1" * 16}
    assert weights_digest({**base, "b": "2" * 16}) != weights_digest(base)
    assert weights_digest({"a": "0" * 16}) != weights_digest(base)


def test_no_tensors():
    assert weights_digest({}) == hashlib.sha256(b"").hexdigest()
