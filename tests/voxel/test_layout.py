import pytest
import torch

from memkit._core.errors import ConfigError
from memkit._core.settings import Checker
from memkit.voxel.layout import VectorField, VoxelLayout, read_axes
from tests.helpers import assert_refused


def test_one_number_is_for_all_channels_and_lists_become_tuples():
    layout = VoxelLayout(["occupancy", "scalar"], empty_value=-1, value_range=[None, [0, 1]], voxel_size=[1, 1, 2])
    assert layout.empties == (-1.0, -1.0)
    assert layout.value_range == (None, (0.0, 1.0))
    assert layout == VoxelLayout(
        ("occupancy", "scalar"), empty_value=(-1, -1), value_range=(None, (0, 1)), voxel_size=(1, 1, 2)
    )
    assert hash(layout)


def test_the_middle_and_the_sensor_are_in_meters_along_named_axes():
    layout = VoxelLayout(
        ("doppler",),
        axes="ZYX",
        voxel_size=(0.5, 0.5, 0.2),
        origin=(0, -4, -1),
        sensor_origin=(0, 0, 0),
    )
    shape = (10, 16, 20)  # Z, Y, X
    assert layout.center(shape) == pytest.approx((5, 0, 0))
    assert layout.off_center(shape) == "X"
    assert not layout.is_square(shape)
    assert layout.is_square((10, 16, 16))
    assert not VoxelLayout(("scalar",), voxel_size=(1, 2, 1)).is_square((8, 8, 8))  # a turn would stretch it


def test_occupancy_is_read_from_its_channel():
    volume = torch.zeros(2, 3)
    volume[1] = torch.tensor([0.0, 5.0, 0.0])
    volume[0, 0] = 1
    assert VoxelLayout(("occupancy", "intensity")).occupied(volume).tolist() == [True, False, False]
    assert VoxelLayout(("intensity", "count")).occupied(volume).tolist() == [False, True, False]
    assert VoxelLayout(("scalar", "scalar")).occupied(volume).tolist() == [True, True, False]
    scaled = VoxelLayout(("occupancy", "intensity"), empty_value=-1)
    assert scaled.occupied(2 * volume - 1).tolist() == [True, False, False]


def test_vectors_are_found_by_name():
    layout = VoxelLayout(("vector:y", "vector:x", "scalar", "vector:x:normal", "vector:y:normal", "vector:z:normal"))
    assert layout.vectors == (VectorField(1, 0, None), VectorField(3, 4, 5))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"channels": ()}, "channels"),
        ({"channels": ("color",)}, "channels='color'"),
        ({"channels": "occupancy"}, "channels"),
        ({"channels": ("vector:x",)}, "x and y together"),
        ({"channels": ("vector:x", "vector:y", "vector:x")}, "each component of a vector once"),
        ({"channels": ("quaternion:w",)}, "channels='quaternion:w'"),  # it would have to turn
        ({"channels": ("vector:w",)}, "channels='vector:w'"),
        ({"channels": ("doppler",)}, "sensor_origin"),
        ({"axes": "XY"}, "axes"),
        ({"axes": "XXZ"}, "axes"),
        ({"voxel_size": (1, 1, 0)}, "voxel_size"),
        ({"voxel_size": (1, 1)}, "voxel_size"),
        ({"origin": (0, 0, float("nan"))}, "origin"),
        ({"empty_value": (0, 0)}, "empty_value"),
        ({"empty_value": "0"}, "empty_value"),
        ({"value_range": (0, 1)}, "value_range"),
        ({"value_range": ((1, 0),)}, "value_range"),
        ({"value_range": ()}, "value_range"),
        ({"channels": ("vector:x", "vector:y"), "value_range": ((-1, 2), None)}, "value_range"),
    ],
)
def test_error_names_invalid_key(settings, key):
    error = assert_refused(lambda: VoxelLayout(**{"channels": ("scalar",)} | settings), ConfigError)
    assert key in f"{error.got} {error.expected}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("XX", "X"), ("xz", "XZ"), ((0, 2), "XZ"), (1, "Y"), ("W", "XYZ"), (None, "XYZ"), (True, "XYZ")],
)
def test_axes_in_other_forms_are_refused_with_the_letters(given, meant):
    check = Checker("read(x)")
    assert read_axes(check, "axes", "XZ") == "XZ"
    assert_refused(lambda: read_axes(check, "axes", given), ConfigError, "each at most once", f"pass axes='{meant}'.")
