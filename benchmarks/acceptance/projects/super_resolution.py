"""pytorch/examples, super_resolution: a plain loop whose step becomes one call of the wrapper."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project

SIZE, STRIDE = 255, 64


def prepare(copy: Copy) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    copy.add_stand_in("torchvision", "super_resolution", "a stand-in: cropping and resizing")
    images = [Image.fromarray(image) for image in load_sample_images().images]
    corners = [(left, top) for top in (0, STRIDE, 2 * STRIDE) for left in range(0, 640 - SIZE, STRIDE)]
    tiles = [image.crop((left, top, left + SIZE, top + SIZE)) for image in images for left, top in corners]
    folder = copy.root / "super_resolution/dataset/BSDS300/images"
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
    for number, tile in enumerate(tiles):
        tile.save(folder / ("train" if number % 4 else "test") / f"{number:02}.png")
    copy.changes.append(f"dataset: {len(tiles)} overlapping parts of scikit-learn's two photographs for BSDS300")
    copy.replace("super_resolution/data.py", "from six.moves import urllib", "import urllib", "six is not needed")
    old, new = "listdir(image_dir) if", "sorted(listdir(image_dir)) if"
    copy.replace("super_resolution/dataset.py", old, new, "the same order of files on every machine")
    old, new = "({}/{}): Loss: {:.4f}", "({}/{}): Loss: {!r}"
    copy.replace("super_resolution/main.py", old, new, "the loss is printed with all its digits")


PROJECT = Project(
    name="super_resolution",
    repository="pytorch/examples",
    commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
    licence="BSD-3-Clause",
    files=tuple(f"super_resolution/{name}.py" for name in ("main", "model", "data", "dataset")),
    folder="super_resolution",
    command=(
        "main.py",
        "--upscale_factor",
        "3",
        "--batchSize",
        "8",
        "--lr",
        "0.001",
        "--threads",
        "0",
        "--testBatchSize",
        "1",
    ),
    num_steps=6,
    loss=r"\): Loss: (\S+)",
    prepare=prepare,
    data="scikit-learn's two photographs, in parts of 255 by 255",
    failed="nothing; measured with `probe=False`, so without the split probe in the first step",
    shows="`MemoryEfficientTrainingWrapper.train_step` with `accumulation_steps=8`",
)
