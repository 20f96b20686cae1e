"""A plan carried out: the only place where bytes of tensors move.

options     how: threads, memory, whether to verify
execute     on a disk: windows of a plan filled, written, read back; upload: into an object store
outputs     the files of an output while they are made
fill        the copies of a window read: one read a run
cast        blocks in memory: strided copies and casts
records     checksums that files keep of their own records
share       ranks that share a plan (threads that share a list of work: `reshard.threads`)

outcome     what an execution saw
spans       byte ranges of files, with checksums
job         which job an unfinished output is of
journal     what of it is on the disk for good; receipts: what of it an object store has
unfinished  either of them
"""
