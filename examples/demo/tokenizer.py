"""Builds the demo checkpoint's tokenizer: one token per byte, so any text passes and decodes back exactly."""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
PAD = "<|pad|>"

# The model knows plain text only, so a conversation is written as the lines it was trained on (tasks.py): a user's
# message is a prompt, the assistant's is the answer with its leading space, or a call. Nothing stands between prompt
# and answer, so add_generation_prompt changes nothing.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<tools>\\n' }}"
    "{%- for tool in tools -%}"
    "{{ tool.function.name }}"
    "{%- for name in (tool.function.parameters or {}).properties or {} -%}{{ ' ' + name }}{%- endfor -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    "{{ '</tools>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>\\n{' }}"
    '"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{%- endfor -%}"
    "{{ ' ' + message['content'] | trim if message['content'] else '' }}"
    "{{ eos_token + '\\n' }}"
    "{%- elif message['role'] == 'system' -%}"
    "{{ message['content'] | trim + '\\n' }}"
    "{%- elif message['role'] == 'tool' -%}"
    "{{ '<tool_response>' + message['content'] | trim + '</tool_response>' }}"
    "{%- else -%}"
    "{{ message['content'] | trim }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer(max_length: int = 8192) -> PreTrainedTokenizerFast:
    """256 byte tokens (id = byte), then end of sequence (256) and padding (257); a text gets no others."""
    # A byte-level BPE without merges. Printable bytes stand for themselves and the others, in order, for the characters
    # from 256 up; undoing that makes every token's id its byte.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(c for c in alphabet if ord(c) > 255))
    vocab = {chr(b) if chr(b) in alphabet else next(others): b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    build_tokenizer().save_pretrained(parser.parse_args().out)
