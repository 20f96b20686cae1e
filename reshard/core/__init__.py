"""The data model: tensors as stored blocks, manifests, and what files state about themselves.

dtypes     the one table of dtypes
box        blocks of a tensor and their geometry, in elements
chunks     the stored blocks of one tensor: file, byte offset and strides of each
views      blocks, permutations and reshapes of a tensor, as other chunks of the same bytes
manifest   all tensors of a checkpoint and its training state; the proof that nothing is missing
computed   values of a tensor that are computed from those of others when they are read
join       the manifests of ranks or pipeline stages joined
renames    a manifest under other names
keys       edits of names: prefixes removed, tensors renamed, selected or excluded
location   where a checkpoint is: a directory, one file, or one directory for each node
stamps     what a file states about the save that it belongs to
schema     the declared structure of values in a pickle or a document
counts     checks of numbers that a file states
differences
           where nested values of two files differ

A manifest is built from headers and edited without reading the elements of any tensor.
"""
