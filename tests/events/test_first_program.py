"""The program whose logs are JSON arrays: its events are known; those of other programs are not."""

import json

import memkit as mk


def log_of(path, *names):
    path.write_text(json.dumps([{"event": name, "peak_memory": 2**20 * (1 + i)} for i, name in enumerate(names)]))
    return mk.report.read_memory_events(path)


def test_a_missing_event_has_a_name(tmp_path):
    log = log_of(tmp_path / "log.json", "init", "t5_loaded", "dit_loaded", "forward_pass")
    assert log.missing_loads == ("vae_loaded",)
    assert log.missing_stages == ("model_loaded", "inference_end")


def test_an_array_of_another_program_lacks_no_load(tmp_path):
    assert log_of(tmp_path / "log.json", "epoch_1", "epoch_2").missing_loads == ()


def test_memkits_own_log_lacks_nothing(tmp_path):
    with mk.MemoryManager("cpu", log=tmp_path / "log.jsonl") as memory:
        memory.mark("t5_loaded")
    log = mk.report.read_memory_events(tmp_path / "log.jsonl")
    assert log.missing_loads == log.missing_stages == ()
