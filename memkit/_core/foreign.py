"""Other libraries' names for memkit's parameters and methods, grouped by meaning, for `memkit._core.words`.

The words are those of accelerate, Lightning, the Hugging Face trainer, DeepSpeed, fairscale, MONAI, torchio, PyG,
Pointcept and plain loops. Answers that only one function needs are given at that function.
"""

from __future__ import annotations

_IDEAS = """
# steps
accumulation_steps gradient_accumulation_steps num_microbatches num_micro_batches n_microbatches microbatches
  gradient_accumulation accumulate_grad_batches grad_accum grad_accum_steps grad_accumulation_steps accum_steps
  accum_iter accumulation accumulate num_accumulation_steps steps num_steps chunks num_chunks
max_grad_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm clip_norm clip grad_clip grad_clip_norm
  max_norm
checkpoint checkpointing gradient_checkpointing activation_checkpointing use_checkpoint use_checkpointing
  use_gradient_checkpointing recompute
precision mixed_precision dtype torch_dtype precision_plugin param_dtype mp_policy
accumulate_dtype sum_dtype reduce_dtype grad_dtype dtype
scaler grad_scaler gradscaler amp_scaler
optimizer optim opt optimizers optimizer_cls
scheduler lr_scheduler schedule sched
model module net network fn function predictor encoder discriminator critic netD D
loss_fn criterion loss loss_func loss_function
count weight num_rows num_samples num_tokens num_items
# memory
memory budget memory_budget capacity limit max_memory max_memory_gb memory_limit memory_manager memory_fraction
  gpu_memory_fraction fraction
gpu card device gpu_name cuda output_device
reset_peaks reset_peak
log log_file log_path events event_log memory_log
# rows, chunks and tiles
batch_size micro_batch_size microbatch_size mini_batch_size train_batch_size per_device_train_batch_size
  train_micro_batch_size_per_gpu bs chunk_size chunk_sizes sw_batch_size rows_per_chunk chunks_of size
tile_size block_size chunk_size patch_size roi_size window_size
dims dim spatial_dims
params parameters parameter weights
reduce reduction aggr
num_segments dim_size num_nodes size_i
weight edge_weight
x input inputs image volume hidden hidden_states _input
target targets label labels gt
prediction pred
# points and volumes
offsets offset ptr
coords coord points pos
grid_size voxel_size resolution res size side image_size
ratio ratios sample_ratio keep p
prob p probability
size spatial_size hole_size
seed random_state
# loops and their states
train_loader loader dataloader data_loader train_dataloader train_dataloaders data train_data dataset batches
val_loader val_dataloader val_dataloaders val_data eval_loader eval_dataloader valid_loader validation_loader
  test_loader
validate_every val_interval val_every val_check_interval validation_interval eval_steps eval_every eval_interval
report_every line_every log_every log_every_n_steps logging_steps log_interval interval
save_every save_steps save_interval checkpoint_every checkpoint_interval every_n_train_steps
num_epochs epochs max_epochs num_train_epochs n_epochs epoch
num_val_batches limit_val_batches max_val_batches val_batches eval_iters
num_batches limit max_batches limit_batches max_steps
directory path dirpath dir folder root default_root_dir checkpoint_dir save_dir output_dir output out output_path
  file filename
keep keep_last max_to_keep n_saved num_keep save_top_k save_total_limit total_limit
background async_ async_save asynchronous non_blocking
writer logger tensorboard summary_writer
progress enable_progress_bar verbose show_progress
patience early_stopping_patience wait
ranks num_ranks world_size num_gpus devices gpus nproc num_replicas
"""
IDEAS = tuple(
    frozenset(line.split()) for line in _IDEAS.replace("\n  ", " ").splitlines() if line and not line.startswith("#")
)
"""Groups of names for one idea, memkit's and other libraries': a call with a parameter of a group understands all."""

VALUES = {
    "precision='bf16-mixed'": "bf16 use_bf16 use_amp amp amp_dtype autocast use_autocast autocast_dtype",
    "precision='fp16-mixed'": "fp16 use_fp16 half",
    "mode='max'": "greater_is_better maximize",
    "progress=False": "disable_tqdm",
    "ratio=(0.3, 0.7)": "min_ratio max_ratio min_sample_ratio max_sample_ratio",
    "monitor=mk.ValidationMonitor(patience=5)": "early_stopping early_stopping_patience patience",
    "state=mk.TrainingStateManager('states')": "checkpoint_dir output_dir save_dir state_dir default_root_dir",
}
"""For each argument as written in a call, the keywords that it answers, for functions that have the parameter."""

# Words that several tables share, with different answers.
ACCUMULATION = "accumulation_steps gradient_accumulation_steps accumulate_grad_batches grad_accum"
BATCH_SIZE = "batch_size train_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu"
CHECKPOINTING = "gradient_checkpointing checkpointing use_checkpoint"
EPOCHS = "epochs num_epochs max_epochs num_train_epochs n_epochs"
HALF_PRECISION = " ".join(words for argument, words in VALUES.items() if argument.startswith("precision="))
LIMIT = "budget memory limit capacity max_memory memory_budget"
LOADER = "dataloader loader train_loader train_dataloader train_dataset dataset data"
LOSS = "loss_fn criterion loss loss_func loss_function"
RANKS = "strategy ddp world_size num_gpus gpus distributed"

# Names of methods and attributes, for `absent`.
LOAD = "load load_state load_checkpoint resume"
PEAK = "peak peak_memory max_memory max_memory_allocated"
RUN = "run fit train start train_loop train_epoch run_loop __call__ ()"
SAVE = "save save_state save_checkpoint"
START = "start stop begin end"
SUMMARY = "summary report table"
AS_DICT = "to_dict dict model_dump"
