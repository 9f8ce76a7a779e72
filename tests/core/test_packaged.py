"""What memkit reads of its own package it also finds where it is a zip archive."""

import zipfile
from pathlib import Path

import pytest

import memkit
from tests.helpers import run_python


@pytest.mark.slow
def test_files_of_the_package_are_found_in_an_archive(tmp_path):
    package, archive = Path(memkit.__file__).parent, tmp_path / "memkit.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                opened.write(path, path.relative_to(package.parent))
    code = f"""
        import sys
        sys.path.insert(0, {str(archive)!r})
        import torch
        import memkit as mk
        print(mk.__file__)
        batch = torch.randn(8, 4), torch.randn(8, 2)
        loss_fn = lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])
        with mk.Tracker(device="cpu") as tracker:
            loss_fn(torch.nn.Linear(4, 2), batch).backward()
        mk.write_report(tracker, {str(tmp_path / "report.html")!r})
        print(len(mk.advise(torch.nn.Linear(4, 2), batch, loss_fn)))
        print(mk.predict.find_gpu("RTX 4090").name, len(mk.predict.gpus.all_gpus()) > 9)
        """
    file, _, gpu = run_python(code, PYTHONPATH="").stdout.splitlines()
    assert file.startswith(str(archive))
    assert gpu == "RTX 4090 True"
    assert "<style>" in (tmp_path / "report.html").read_text("utf-8")
