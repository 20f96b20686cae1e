"""Directories of training libraries, laid out: Accelerate's and HF Trainer's.

`pytorch` reads both.
"""
