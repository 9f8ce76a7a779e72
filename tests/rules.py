"""CUDA's rules of one version, for tests that say bytes: those of the installed one differ (`docs/versions.md`)."""

import pytest

from memkit._simulation import simulation
from memkit._torch.cuda import rules_of
from memkit.predict import virtual_gpu

VERSION = "2.13"  # the one that CI runs; the recorded runs are exact under its rules


@pytest.fixture(autouse=True, scope="module")
def rules_of_one_version():
    """What is simulated where nobody says a version."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (simulation, virtual_gpu):
            patch.setattr(module, "rules_of", lambda torch=None, cudnn=None: rules_of(torch or VERSION, cudnn))
        yield
