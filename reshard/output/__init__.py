"""Output: written in a hidden directory, then published in one step: complete, or not at all."""
