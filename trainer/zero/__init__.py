"""The parts of ZeRO: who owns what, how it is summed, where it lives, when it is whole."""
