"""The hidden place where an output grows, and its one step into sight: whole, or not at all."""
