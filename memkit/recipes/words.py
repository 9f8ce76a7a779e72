"""How other libraries name the arguments and methods of loops, states and stages, for `memkit._core.words.guided`."""

from __future__ import annotations

from memkit._core.foreign import EPOCHS, LOAD, LOADER, LOSS, RUN, SAVE

LOOP_WORDS = {
    "trainer=MemoryEfficientTrainingWrapper(model, optimizer)": "model",
    "loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])": LOSS,
    "the number of epochs goes into loop.run(num_epochs=10)": EPOCHS,
    "it goes into the wrapper, MemoryEfficientTrainingWrapper(model, optimizer, ...)": (
        "optimizer scheduler lr_scheduler accumulation_steps precision max_grad_norm gradient_clip_val"
    ),
    "a run ends after a number of epochs, loop.run(num_epochs=10)": "max_steps num_steps total_steps",
}

LOOP_ABSENT = {
    "loop.run(num_epochs=10)": RUN,
    "loop.run_step(batch)": "step train_step training_step",
    "loop.validate(loader)": "evaluate validation test",
    "state=mk.TrainingStateManager(...) in the constructor": SAVE,
    "loop.run(...), which resumes from its state manager's newest state": LOAD,
    "loop.num_steps": "global_step step_count steps",
    "loop.trainer.model": "model optimizer",
}

MONITOR_WORDS = {
    "metric": "monitor key metric_name name",
    "min_delta": "threshold delta early_stopping_threshold tolerance",
    "value": "loss score metrics",
    "step": "epoch global_step",
}

MONITOR_ABSENT = {
    "monitor.update(value)": "step add append log check record __call__ ()",
    "monitor.best": "best_score best_value best_metric best_loss best_model_score",
    "monitor.should_stop": "stop early_stop is_over stopped",
    "monitor.plateau": "counter wait wait_count num_bad_epochs bad_epochs",
    "is_best = monitor.update(value)": "is_best improved is_better",
    "monitor.best_step": "best_epoch",
    "monitor.history": "values losses metrics",
}

STATE_WORDS = {
    "the monitor's figure goes into state.save(step, metric=value, ...)": "monitor metric",
    "the loop decides when to save: MemoryEfficientTrainLoop(..., save_every=1000)": "save_every every_n_train_steps",
    "a state has a folder of its own, named by its step": "filename prefix name file_name",
}

STATE_ABSENT = {
    "step = state.restore(model=model, optimizer=optimizer)": LOAD,
    "state.save(step, model=model, optimizer=optimizer)": f"{SAVE} checkpoint dump __call__ ()",
    "state.steps": "latest latest_step list checkpoints last_checkpoint latest_checkpoint all_steps",
    "state.best_step": "best best_model_path best_checkpoint",
    "state.restore('best', model=model)": "load_best restore_best",
    "state.wait()": "flush join wait_until_finished",
}

ENHANCED_WORDS = {
    "base_train_loop": "loop train_loop base base_loop trainer",
    "val_dataloader": "val_data",
    "enable_validation": "validate validation do_eval",
    "val_fn": "eval_fn validation_fn validate_fn",
}

ENHANCED_ABSENT = {
    "loop.run_loop()": RUN,
    "loop.figures": "metrics validation results val_loss",
    "loop.num_steps": "step global_step steps",
    "loop.memory": "memory_manager manager",
}

STAGE_WORDS = {
    "resolution": "size",
    "batch_size": "batch num_rows",
    "a stage ends after its epochs": "steps num_steps max_steps iterations",
}

PROGRESSIVE_WORDS = {
    "step_fn": "train_fn train_step step fn trainer",
    "stages=[mk.recipes.Stage(32, batch_size=16, epochs=5)]": "resolutions sizes schedule image_sizes batch_sizes",
    "resize": "resize_fn transform interpolate downsample",
    "bn_batches": "num_bn_batches bn_steps",
    "the loader goes into run(loader)": LOADER,
}

PROGRESSIVE_ABSENT = {
    "progressive.run(loader)": RUN,
    "progressive.state_dict()": SAVE,
    "progressive.load_state_dict(state)": LOAD,
}

REPORT_WORDS = {
    "baseline": "before compare compare_to other",
    "language": "lang locale",
    "the suffix of the path sets the format, as in 'report.html'": "format fmt",
}
