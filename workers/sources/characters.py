"""A character tokenizer: four special tokens, newline and the printable ASCII characters."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.model import TINY_VOCABULARY

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
_SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The beginning-of-sequence token and the bare texts: a tiny model has no notion of roles."""


def character_tokenizer(vocab_size: int = TINY_VOCABULARY) -> Any:
    """A transformers tokenizer, one token a character.

    Tokens beyond the characters are written as a space and their own number. No text is encoded
    to them; a model without training samples them, and its text is not empty then.
    """
    tokens = [*_SPECIALS, *_CHARACTERS]
    tokens.extend(f" {place}" for place in range(len(tokens), vocab_size))
    vocabulary = {token: place for place, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
