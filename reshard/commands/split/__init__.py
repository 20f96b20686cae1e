"""``split`` and ``convert``: the training state for other ranks or in another layout.

command     what is done, in order
options     the options of the command
request     the options of the output, resolved: the user's, else the source's values; the stamp
passes      the passes over the conversion, up to the files to write
read_back   the output, as the reader of its format sees it
report      what was kept, derived and dropped
"""
