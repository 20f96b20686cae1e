"""Weights stored in parts: as small codes with a scale for each block, or as two halves.

statement    what the files of a model state about its quantisation
pairs        the codes and scales of each weight, with their geometry checked
compressed   those of compressed-tensors and of Model Optimizer
packed       codes of bitsandbytes without their scales
scale_names  names of scales, which tell them from weights
weights      the stored tensors of a weight, and its values
scaled       the geometry: where codes and scales are, and which belong together
grids        how scales are spread over a weight
decode       the arithmetic of dequantisation, with numpy
encode       the arithmetic of quantisation
tiles        codes and scales as computed bytes
loops        the loops of both over the values, compiled or with numpy
moments      optimizer state that torchao and bitsandbytes store as codes
remainders   fp32 masters from 16-bit weights and remainders (Transformer Engine's Adam)

Known methods are ``fp8`` (DeepSeek V3 and others: blocks of 128 x 128, or one scale for a tensor),
``mxfp8``, ``mxfp4`` (GPT-OSS), ``compressed-tensors`` and ``modelopt``. Others are refused by name.
The values are those of the libraries: transformers 5.23 (``integrations/finegrained_fp8.py``,
``Fp8Dequantize``; ``integrations/mxfp4.py``, ``convert_moe_packed_tensors``) and those that
`compressed` names, with one exception. Where the last blocks of a weight are smaller, transformers
divides the weight into equal blocks, or fails. Here the blocks have the size that config.json
states, as in DeepSeek's own ``inference/kernel.py`` (``weight_dequant``).
"""

BITSANDBYTES = "__bnb_optimizer_quant_state__/"
"""Prefix of bitsandbytes' slots, which are in a dict of their own since 0.49."""
