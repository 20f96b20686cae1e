"""The tokenizer of the byte-level tokens (``core/data.py``), as ``transformers`` loads it."""

from __future__ import annotations

from pathlib import Path

from trainer.core.errors import get_first_line

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
    try:
        ready.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises it bare if it cannot write
            raise
        raise OSError(get_first_line(error)) from error
