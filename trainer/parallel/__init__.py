"""Ways to cut a model over ranks that train the same samples.

grid       the axes, and the numbers of the ranks in them
tensor     cuts each layer's matrices, with torch's ``parallelize_module``
pipeline   cuts the layers into stages, with torch's pipelining
experts    cuts the experts of each layer

``engines/grid.py`` combines them.
"""
