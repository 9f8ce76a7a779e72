"""Checks around every test: a fresh seed, and no leaked dtype, gradient mode, environment or thread."""

import gc
import os
import re
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.modules.module import _has_any_global_hook

settings.register_profile(
    "memkit", derandomize=True, deadline=None, max_examples=24, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memkit")
# Small tensors: on a busy machine two threads would wait for each other. Processes that tests start see the variable.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of those processes compiles memkit again

# Without a GPU, `torch.manual_seed` keeps a stack trace at each call, for when there is one: 0.7 ms for a test.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

# torch's compiler shows progress where tqdm is there, and where Triton is compiles in a pool that stays.
_MAY_STAY = re.compile(r"tqdm_monitor|Thread-\d+ \(_read_thread\)")
# Set by pytest, by torch's first optimizer, and by the first import of scikit-learn.
_MAY_CHANGE = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by Lightning's import
}


@pytest.fixture(autouse=True, scope="module")
def set_aside():
    """Hide half a million objects of imports and earlier tests: a recovery or a check for leaks looks at all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    _seed(0)
    np.random.seed(0)
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert not _has_any_global_hook()  # of modules: torch.compile warns of them
    changed = {
        key for key, _ in set(os.environ.items()) ^ set(environment.items()) if not key.startswith("ACCELERATE_")
    }
    assert changed <= _MAY_CHANGE
    new = [each for each in set(threading.enumerate()) - threads if not _MAY_STAY.fullmatch(each.name)]
    for thread in new:
        thread.join(timeout=5)  # a thread that was asked to end, such as a DataLoader's, may still be running
    assert [each.name for each in new if each.is_alive()] == []
