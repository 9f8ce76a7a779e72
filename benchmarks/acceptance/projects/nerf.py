"""yenchenlin/nerf-pytorch: the network of points in chunks, which in training saves memory only with memkit."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.acceptance.project import Copy, Project

NUM_VIEWS, SIZE, CAMERA_ANGLE, DISTANCE = 12, 100, 0.69, 4.0
IMAGEIO = "import numpy\nfrom PIL import Image\n\n\ndef imread(path):\n    return numpy.asarray(Image.open(path))\n"


def prepare(copy: Copy) -> None:
    write_views(copy)
    copy.write("imageio.py", IMAGEIO, "a stand-in: reads pictures with PIL")
    copy.write("cv2.py", "", "a stand-in: nothing of it is used here")
    copy.replace("run_nerf.py", "import configargparse", "import argparse as configargparse", "no files of settings")
    copy.replace("run_nerf.py", "is_config_file=True, ", "", "no files of settings")
    copy.replace("run_nerf.py", "torch.set_default_tensor_type('torch.cuda.FloatTensor')", "pass", "runs on the CPU")
    for file in ("run_nerf.py", "load_blender.py"):
        copy.replace(file, ".float()", "", "computes in the dtype of the comparison")


def write_views(copy: Copy) -> None:
    """Write pictures of a mesh from all around, with the cameras, as Blender scenes have them."""
    import pyvista
    from PIL import Image
    from pyvista import examples

    mesh = examples.load_airplane()
    mesh.translate(-np.array(mesh.center), inplace=True)
    mesh.scale(2 / mesh.length, inplace=True)
    mesh["height"] = mesh.points[:, 2]
    frames: list[dict[str, object]] = []
    folder = copy.root / "data"
    folder.mkdir()
    for view, azimuth in enumerate(np.linspace(0, 2 * np.pi, NUM_VIEWS, endpoint=False)):
        elevation = np.deg2rad(20 + 15 * (view % 3))
        around = np.array([np.cos(azimuth), np.sin(azimuth), 0]) * np.cos(elevation)
        backward = around + np.array([0, 0, np.sin(elevation)])
        plotter = pyvista.Plotter(off_screen=True, window_size=(SIZE, SIZE))
        plotter.add_mesh(mesh, scalars="height", show_scalar_bar=False)
        plotter.camera.position, plotter.camera.focal_point = DISTANCE * backward, (0, 0, 0)
        plotter.camera.up, plotter.camera.view_angle = (0, 0, 1), np.rad2deg(CAMERA_ANGLE)
        picture = plotter.screenshot(None, transparent_background=True, return_img=True)
        plotter.close()
        Image.fromarray(picture).save(folder / f"{view}.png")
        right = np.cross((0, 0, 1), backward)
        right /= np.linalg.norm(right)
        pose = np.eye(4)
        pose[:3] = np.stack([right, np.cross(backward, right), backward, DISTANCE * backward], axis=1)
        frames.append({"file_path": str(view), "transform_matrix": pose.tolist()})
    for split, views in {"train": frames[:-2], "val": frames[-2:-1], "test": frames[-1:]}.items():
        content = json.dumps({"camera_angle_x": CAMERA_ANGLE, "frames": views})
        (folder / f"transforms_{split}.json").write_text(content)
    copy.changes.append("data: the views, in the form of the Blender scenes")


PROJECT = Project(
    name="nerf",
    repository="yenchenlin/nerf-pytorch",
    commit="63a5a630c9abd62b0f21c08703d0ac2ea7d4b9dd",
    licence="MIT",
    files=(
        *("run_nerf.py", "run_nerf_helpers.py", "load_llff.py", "load_deepvoxels.py", "load_blender.py"),
        "load_LINEMOD.py",
    ),
    folder=".",
    command=(
        *("run_nerf.py", "--dataset_type", "blender", "--datadir", "data", "--basedir", "logs", "--expname", "plane"),
        *("--white_bkgd", "--use_viewdirs", "--N_rand", "512", "--N_samples", "32", "--N_importance", "32"),
        *("--netwidth", "64", "--netwidth_fine", "64", "--netchunk", "2048", "--i_print", "1"),
    ),
    num_steps=12,
    loss=r"Loss: ([\d.e-]+)",
    prepare=prepare,
    data="12 pictures of pyvista's airplane mesh, 100 by 100, 512 rays per step",
    shows="`chunked_map` for the loop over chunks of points, which keeps the activations of all of them",
)
