"""How other libraries name the arguments and methods of loops, states and stages."""

from __future__ import annotations

from memkit._core.calls import by_word

LOOP_WORDS = by_word(
    {
        "trainer=MemoryEfficientTrainingWrapper(model, optimizer)": "model",
        "train_loader": "loader dataloader train_dataloader data train_dataloaders train_data",
        "val_loader": "val_dataloader eval_loader valid_loader test_loader val_dataloaders",
        "loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])": "criterion loss loss_function",
        "the number of epochs goes into loop.run(num_epochs=10)": (
            "max_epochs num_epochs epochs num_train_epochs n_epochs"
        ),
        "validate_every": "val_interval val_check_interval eval_steps eval_every validation_interval",
        "report_every": "log_every log_every_n_steps logging_steps log_interval",
        "save_every": "save_steps save_interval checkpoint_every checkpoint_interval",
        "monitor=mk.ValidationMonitor(patience=5)": "early_stopping patience early_stopping_patience",
        "state=mk.TrainingStateManager('states')": "checkpoint_dir output_dir save_dir default_root_dir",
        "writer": "logger tensorboard summary_writer",
        "progress": "enable_progress_bar disable_tqdm verbose show_progress",
        "it goes into the wrapper, MemoryEfficientTrainingWrapper(model, optimizer, ...)": (
            "optimizer scheduler lr_scheduler accumulation_steps precision max_grad_norm gradient_clip_val"
        ),
        "the number of epochs is what ends a run, loop.run(num_epochs=10)": "max_steps num_steps total_steps",
    }
)

RUN_WORDS = by_word({"num_epochs": "epochs max_epochs num_train_epochs n_epochs"})

LOOP_ABSENT = by_word(
    {
        "loop.run(num_epochs=10)": "fit train start run_loop __call__ ()",
        "loop.run_step(batch)": "step train_step training_step",
        "loop.validate(loader)": "evaluate validation test",
        "state=mk.TrainingStateManager(...) in the constructor": "save save_checkpoint",
        "loop.run(...), which resumes where its state manager has a state": "resume load load_checkpoint",
        "loop.num_steps": "global_step step_count steps",
        "loop.trainer.model": "model optimizer",
    }
)

MONITOR_WORDS = by_word(
    {
        "metric": "monitor key metric_name name",
        "min_delta": "threshold delta early_stopping_threshold tolerance",
        "patience": "early_stopping_patience wait",
        "mode='max'": "greater_is_better maximize",
        "value": "loss score metrics",
        "step": "epoch global_step",
    }
)

MONITOR_ABSENT = by_word(
    {
        "monitor.update(value)": "step add append log check record __call__ ()",
        "monitor.best": "best_score best_value best_metric best_loss best_model_score",
        "monitor.should_stop": "stop early_stop is_over stopped",
        "monitor.plateau": "counter wait wait_count num_bad_epochs bad_epochs",
        "is_best = monitor.update(value)": "is_best improved is_better",
        "monitor.best_step": "best_epoch",
        "monitor.history": "values losses metrics",
    }
)

STATE_WORDS = by_word(
    {
        "directory": "path dirpath output_dir save_dir checkpoint_dir folder root dir",
        "keep": "save_top_k save_total_limit max_to_keep keep_last num_keep n_saved total_limit",
        "the monitor's figure goes into state.save(step, metric=value, ...)": "monitor metric",
        "background": "async_save non_blocking asynchronous async_",
        "when to save is the loop's: MemoryEfficientTrainLoop(..., save_every=1000)": "save_every every_n_train_steps",
        "a state has a folder of its own, named by its step": "filename prefix name file_name",
        "mode='max'": "greater_is_better",
    }
)

STATE_ABSENT = by_word(
    {
        "step = state.restore(model=model, optimizer=optimizer)": "load load_checkpoint resume load_state",
        "state.save(step, model=model, optimizer=optimizer)": "save_checkpoint checkpoint dump __call__ () save_state",
        "state.steps": "latest latest_step list checkpoints last_checkpoint latest_checkpoint all_steps",
        "state.best_step": "best best_model_path best_checkpoint",
        "state.restore('best', model=model)": "load_best restore_best",
        "state.wait()": "flush join wait_until_finished",
    }
)

ENHANCED_WORDS = by_word(
    {
        "base_train_loop": "loop train_loop base base_loop trainer",
        "val_dataloader": "val_loader val_data eval_dataloader valid_loader eval_loader validation_loader",
        "val_interval": "validate_every val_every eval_every eval_interval eval_steps val_check_interval",
        "memory_fraction": "memory budget memory_budget max_memory memory_limit gpu_memory_fraction",
        "monitor=mk.ValidationMonitor(patience=5)": "patience early_stopping early_stopping_patience",
        "state=mk.TrainingStateManager('states')": "checkpoint_dir save_dir output_dir state_dir",
        "num_val_batches": "limit_val_batches max_val_batches val_batches eval_iters",
        "num_epochs": "epochs max_epochs num_train_epochs",
        "enable_validation": "validate validation do_eval",
        "val_fn": "eval_fn validation_fn validate_fn",
    }
)

ENHANCED_ABSENT = by_word(
    {
        "loop.run_loop()": "run fit train start __call__ ()",
        "loop.figures": "metrics validation results val_loss",
        "loop.num_steps": "step global_step steps",
        "loop.memory": "memory_manager manager",
    }
)

STAGE_WORDS = by_word(
    {
        "resolution": "res size image_size side grid_size voxel_size",
        "batch_size": "batch bs micro_batch_size num_rows",
        "epochs": "num_epochs max_epochs n_epochs epoch",
        "stages end by epochs alone": "steps num_steps max_steps iterations",
    }
)

PROGRESSIVE_WORDS = by_word(
    {
        "step_fn": "train_fn train_step step fn trainer",
        "stages=[mk.recipes.Stage(32, batch_size=16, epochs=5)]": "resolutions sizes schedule image_sizes batch_sizes",
        "resize": "resize_fn transform interpolate downsample",
        "bn_batches": "num_bn_batches bn_steps",
        "the loader goes into run(loader)": "loader dataloader train_loader data",
    }
)

PROGRESSIVE_ABSENT = by_word(
    {
        "progressive.run(loader)": "fit train start __call__ ()",
        "progressive.state_dict()": "save save_checkpoint",
        "progressive.load_state_dict(state)": "load resume load_checkpoint",
    }
)

REPORT_WORDS = by_word(
    {
        "path": "output out file filename output_path",
        "log": "events event_log memory_log",
        "baseline": "before compare compare_to other",
        "gpu": "card device gpu_name",
        "language": "lang locale",
        "the suffix of the path sets the format, as in 'report.html'": "format fmt",
    }
)
