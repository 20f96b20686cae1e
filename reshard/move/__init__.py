"""A plan carried out: the only place where bytes of tensors move."""
