"""Access to files, object stores, processes, threads and signals.

paths       local paths, and URLs of object stores
versions    what shows that a file was not changed since its header was read
files       pools of open files, and reads of bounded size
ranges      byte ranges of files that are fetched together
remote      object stores
escaped     the decoded bytes of an escaped text in a file, read like a file
derived     bytes that are computed when they are read, read like a file
checksum    CRC-32 of parts and of their whole
ranks       several processes that share one conversion
threads     loops over several threads, which always end
optional    libraries that only some commands need, and what to say without them
compiled    modules that a C compiler makes at the installation
signals     signals that are raised between two blocks of work
attributes  other libraries' attributes, replaced for a while

Nothing here depends on the format of a checkpoint.
"""
