"""The conversion itself: the only packages that copy elements of tensors and write output.

planning  a manifest and the files to write become windows of copies
move      the copies are executed: read, cast, written, read back
output    the output is written in a hidden directory, and published when it is complete

Nothing here knows the format of the source or of the output.
"""
