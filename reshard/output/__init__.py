"""Output: written in a hidden directory, then published in one step: complete, or not at all.

destination  checks before any work is done
commit       the hidden directory becomes the destination, or is kept or removed after an error
partial      the hidden directory on a file system, locked by one run
local        publishing on a file system: a link, a rename or an exchange
remote       the hidden folder in an object store
lease        the claim of a process on that folder
publish      copying of the files to their final names by the store
temporary    temporary local directories
"""
