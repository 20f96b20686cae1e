"""The state of a rank's optimizer, and which parameters it belongs to.

rank_optimizer  optimizers that list their masters and states, alone or chained
buckets         the layout of the distributed optimizer's flat buffers
flat_buffers    the parameters and the slots in these buffers
dist_flat       the same buffers in torch_dist
frozen          which parameters an optimizer has if the run froze some
groups          which param group a parameter is in
"""
