"""openai/improved-diffusion: its own micro-batches give a sum of means; memkit's give the gradient of the batch."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project

TILE = 64
MPI = """class Communicator:
    rank, size = 0, 1

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def bcast(self, value, root=0):
        return value


class MPI:
    COMM_WORLD = Communicator()
"""
BLOBFILE = "from os import listdir\nfrom os.path import basename, dirname, exists, isdir, join\n\nBlobFile = open\n"


def prepare(copy: Copy) -> None:
    write_tiles(copy)
    (copy.root / "scripts" / "image_train.py").rename(copy.root / "image_train.py")
    copy.changes.append("image_train.py: beside its package, which is not installed")
    copy.write("mpi4py.py", MPI, "a stand-in: one process")
    copy.write("blobfile.py", BLOBFILE, "a stand-in: local files")
    copy.replace("image_train.py", "logger.configure()", "logger.configure('logs')", "a folder")
    copy.replace("improved_diffusion/logger.py", '"%-8.3g" % val', "repr(float(val))", "all digits are printed")
    for file in ("gaussian_diffusion", "nn", "resample"):
        path = f"improved_diffusion/{file}.py"
        copy.replace(path, ".float()", ".to(th.get_default_dtype())", "computes in the dtype of the comparison")
    copy.replace("improved_diffusion/nn.py", "th.float32", "th.get_default_dtype()", "the same")
    read = "batch, cond = next(self.data)"
    cast = f"{read}\n            batch = batch.to(th.get_default_dtype())"
    copy.replace("improved_diffusion/train_util.py", read, cast, "the same")


def write_tiles(copy: Copy) -> None:
    """Write scikit-learn's two photographs as tiles."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    folder = copy.root / "data"
    folder.mkdir()
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        for top in range(0, photograph.shape[0] - TILE + 1, TILE):
            for left in range(0, photograph.shape[1] - TILE + 1, TILE):
                tile = photograph[top : top + TILE, left : left + TILE]
                Image.fromarray(tile).save(folder / f"{name}_{top:03d}_{left:03d}.png")
    copy.changes.append("data: scikit-learn's photographs, cut into tiles")


PROJECT = Project(
    name="improved_diffusion",
    repository="openai/improved-diffusion",
    commit="1bc7bbbdc414d83d4abf2ad8cc1446dc36c4e4d5",
    licence="MIT",
    files=("improved_diffusion", "scripts/image_train.py"),
    folder=".",
    command=(
        *("image_train.py", "--data_dir", "data", "--image_size", "32", "--batch_size", "16", "--lr", "1e-3"),
        *("--num_channels", "32", "--num_res_blocks", "1", "--attention_resolutions", "16", "--log_interval", "1"),
    ),
    num_steps=12,
    loss=r"\| (?:loss|grad_norm) +\| ([\d.e-]+)",
    prepare=prepare,
    data="scikit-learn's two photographs as 120 tiles, 32 by 32",
    exactness=1e-7,  # of the states: its attention begins at zero, and Adam divides rounding there by its own size
    shows="`GradientAccumulator` in its `microbatch` loop: 4 parts with the curve of the batch, gradient norm too",
    control="its own `microbatch` alone: the means of 4 parts are added up, and not divided",
)
