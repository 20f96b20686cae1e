"""LoRA adapters of PEFT: which tensors are one's, and whether its configuration fits them."""
