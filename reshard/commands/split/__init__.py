"""``split`` and ``convert``: the training state for other ranks or in another layout."""
