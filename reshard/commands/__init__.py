"""One module or folder a command: what the command line and the Python API call.

inspect, merge, split, diff, verify, resume_check, demo
            the commands; split is convert too
options     options that several commands share
reading     what every command shares that reads tensors
output      what every command shares that writes
target      a target held to proof before a byte of it is written
naming      other names for what is written, by a model's table
balance     what became of every value that was read
lines, page
            a report in words, and as a page
programs    the one place where other programs are started
"""
