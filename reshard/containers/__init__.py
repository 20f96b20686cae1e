"""Containers: read and lay out the files that checkpoints of any format consist of.

Readers parse headers, directories and pickles, never the elements of tensors. Writers lay a file
out before the elements are read, so that `move` can copy them to their final offsets.

    torch_reader   files of ``torch.save``, also those from before torch 1.6
    pickle_cache   pickles that many such files have in common
    torch_objects  tensors and storages in their pickles; numpy_arrays: numpy's arrays there
    torch_writer   files of ``torch.save``, without torch
    torch_detect   which files ``torch.save`` wrote
    zip_reader     the zip archives in which torch stores them; zip_writer
    safetensors    safetensors files, in both directions; safetensors_shards: several under an index
    json_files     small JSON files; yaml_files: YAML of plain values
    skeletons      several laid-out files joined into one output
"""
