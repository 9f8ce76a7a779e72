"""wolny/pytorch-3dunet: the blocks of a 3D U-Net run again in backward; its class and its trainer stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.acceptance.project import Copy, Project

CONFIG = """
manual_seed: 0
device: cpu
model: {name: UNet3D, in_channels: 1, out_channels: 2, layer_order: gcr, f_maps: 8, num_levels: 3, num_groups: 4,
  final_sigmoid: false, is_segmentation: true}
trainer: {checkpoint_dir: runs, max_num_epochs: 10, max_num_iterations: 100, validate_after_iters: 100,
  log_after_iters: 100}
optimizer: {learning_rate: 0.002, weight_decay: 0.00001}
loss: {name: CrossEntropyLoss}
eval_metric: {name: MeanIoU}
loaders:
  dataset: StandardHDF5Dataset
  batch_size: 1
  num_workers: 0
  train: &phase
    file_paths: [train.h5]
    slice_builder: {name: SliceBuilder, patch_shape: [16, 64, 64], stride_shape: [16, 64, 64]}
    transformer:
      raw: [{name: Standardize}, {name: ToTensor, expand_dims: true}]
      label: [{name: ToTensor, expand_dims: false, dtype: int64}]
  val:
    <<: *phase
    file_paths: [val.h5]
"""


def read_volume(templates: Path, kind: str) -> np.ndarray:
    """Read the middle of a template, from 0 to 1."""
    import nibabel

    image = nibabel.load(templates / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz")
    volume = image.get_fdata(dtype=np.float32)
    return volume[:, 52:180, 30:158] / volume.max()


def prepare(copy: Copy) -> None:
    import h5py
    import nilearn.datasets

    copy.write("config.yml", CONFIG, "settings")
    copy.write("train.py", "from pytorch3dunet.train import main\n\nmain()\n", "its entry point, as a script")
    templates = Path(nilearn.datasets.__file__).parent / "data"
    for name, rows in (("train", np.s_[66:130]), ("val", np.s_[130:162])):
        with h5py.File(copy.root / f"{name}.h5", "w") as file:
            file["raw"] = read_volume(templates, "t1")[rows]
            file["label"] = (read_volume(templates, "gm")[rows] > 0.5).astype(np.uint8)
    copy.changes.append("train.h5, val.h5: the volumes")
    trainer = "pytorch3dunet/unet3d/trainer.py"
    move = "input.to(device, non_blocking=True)"
    cast = "torch.get_default_dtype() if input.is_floating_point() else None"
    copy.replace(trainer, move, f"input.to(device=device, dtype={cast})", "computes in the dtype of the comparison")
    update = "train_losses.update(loss.item(), self._batch_size(input))"
    copy.replace(trainer, update, f"{update}; print('loss', loss.item())", "the loss of every step is printed")


PROJECT = Project(
    name="unet3d",
    repository="wolny/pytorch-3dunet",
    commit="a33e2c7038a0b51296ca4f99b0f0ed4b61740705",
    licence="MIT",
    files=("pytorch3dunet",),
    folder=".",
    command=("train.py", "--config", "config.yml"),
    num_steps=8,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="nilearn's MNI152 template: gray matter in patches of 16 by 64 by 64",
    shows='`MemoryEfficientTrainingWrapper(..., checkpoint="auto")`: its encoders and decoders run again in backward',
    peers=("h5py", "scikit-image"),
)
