"""Byte-level tokens: token i < 256 is byte i, and token 256 ends a text."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import translate_rust_errors

VOCABULARY = 257
END = "<|endoftext|>"


def save(directory: Path) -> None:
    """Write the tokenizer for ``transformers`` (tokenizer.json, tokenizer_config.json)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab={**tokens, END: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ready = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    with translate_rust_errors():
        ready.save_pretrained(directory)
