"""Execution of a plan: the only package that moves bytes of tensors.

options       threads, memory, whether to verify
execute       fill the windows of a plan, write them and read them back
on_demand     files of a plan that are computed when they are read
fill          read the copies of a window, one read for each run
ahead         large requests, many in flight, where reads wait or ranges are small
tiles         keep a computed tile between two reads, for computations that work tile by tile
cast          strided copies and casts in memory
compiled      the usual casts by a compiled module, which is optional
records       compare and compute the checksums that files store of their own records
distribution  distribution of a plan over ranks (over threads: `reshard.system.threads`)

outcome       what an execution did and found
spans         byte ranges of files, with checksums
job           the description that identifies a conversion, so that it can be resumed
journal       progress on a disk
receipts      execution into an object store, file by file, and its progress
unfinished    what journal and receipts have in common
"""
