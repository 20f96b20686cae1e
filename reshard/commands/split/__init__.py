"""``split`` and ``convert``: the training state for other ranks or in another layout.

command        what is done, in order
options        what the user can ask for
request        what is to be written: the user's choices, else the source's own
for_megatron   the same for Megatron
state          the source's state, with what it lacks and the user asked for
rng            random states of ranks
own_states     what ranks of Megatron saved beside tensors
run_of_trainer what our trainer keeps beside its checkpoints
read_back      what was written, as the reader of its format sees it
report         what was kept, derived and dropped
"""
