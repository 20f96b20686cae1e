"""One module or folder for each command, which the command line and the Python API call.

inspect, merge, average, split, diff, verify, resume_check, plan, mount, demo
            the commands; split is convert too
options, output_options
            options that several commands share
reading     opening a source that tensors are read from
output, output_report
            converting and writing a checkpoint, checks of the output, and its report
forecast    memory, disk and time of a dry run
existing_output
            comparison of a planned output with files that are there already
unwritten, open_files
            planning of an output whose files are read without being written, and opening them
passes      passes over a conversion that merge and split share
leaf_counts counts of the values that were read
lines, page
            reports as text and as HTML pages
programs    the only module that starts other programs
"""
