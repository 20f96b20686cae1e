"""Output: written in a hidden directory, then published in one step: complete, or not at all.

destination  checks before any work is done
commit       the hidden directory becomes the destination, or is kept or removed after an error
files        open files of the output: created, written and read back
uploads      uploads of finished files to an object store, read back
local        the hidden directory on a file system: locked by one run, then linked or renamed
remote       the hidden folder in an object store
lease        the claim of a process on that folder
holder       how a process identifies itself in a lock or lease
publish      copying of the files to their final names by the store
temporary    temporary local directories
"""
