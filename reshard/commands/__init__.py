"""One module or folder for each command, which the command line and the Python API call.

inspect, merge, split, diff, verify, resume_check, demo
            the commands; split is convert too
options, output_options
            options that several commands share
reading     opening a source that tensors are read from
output      writing a checkpoint, and checks of the plan and of the output
padding     notes on padding rows of the vocabulary that were trained
balance     counts of the values that were read
lines, page
            reports as text and as HTML pages
programs    the only module that starts other programs
"""
