"""Lay out the directories of training libraries: Accelerate's and HF Trainer's.

`pytorch` reads both.
"""
