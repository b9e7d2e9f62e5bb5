"""A byte-level tokenizer for synthetic checkpoints: any text goes in and comes out, any vocabulary size is filled."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(3)
SMALLEST_VOCAB = len(_SPECIAL_TOKENS) + 256
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer files to ``folder`` so that ``AutoTokenizer.from_pretrained(folder)`` works without a network.

    The first ids are pad, bos, eos and the 256 bytes; the rest are pairs of bytes, letters first, so that every id
    below ``vocab_size`` decodes to something. ``vocab_size`` is at least SMALLEST_VOCAB.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (not letter.isalpha(), letter))
    n_pairs = max(0, vocab_size - SMALLEST_VOCAB)
    pairs = list(itertools.islice(itertools.product(letters, letters), n_pairs))
    tokens = [*_SPECIAL_TOKENS, *letters, *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    pad, bos, eos = _SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
