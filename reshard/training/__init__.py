"""The training state that a checkpoint holds beside weights, independent of its format.

state         the state that targets write: weights, optimizer groups and their members
optimizers    the table of known optimizers: slots and step counters of each
completeness  the proof that an optimizer's state fits its weights and is whole
shared_scalars
              0-d optimizer values of a flat tensor, which its members share
param_groups  param groups that the user gives
fresh_adam    an Adam at step 0, for a source without an optimizer
loss_scale    dynamic loss scalers of torch and DeepSpeed
rng           random states of ranks
schedules     states of learning-rate schedules, also for another number of ranks
batch         the batch arithmetic of another number of ranks, and the positions in the data that
              each rank saved
copied_files  files that are copied unchanged
companion_files
              config, tokenizer and processor files of the model; the progress of a run
sentence_modules
              the modules of a SentenceTransformer, each of which has files of its own
trainer_run   what a run of ``python -m trainer`` states in ``trainer_state.json``
"""
