"""Configuration files of other programs, read into settings without changes to them.

huggingface   the model: a built-in one, a config.json, or a directory
deepspeed     ds_config.json of DeepSpeed
accelerate    the YAML file of ``accelerate config``
rules         apply a table of rules, one for each field, to a file
choices       chosen settings and where each comes from
"""
