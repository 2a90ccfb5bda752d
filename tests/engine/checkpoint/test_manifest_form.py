"""Shapes in a manifest: as large as they may be, and no larger."""

import pytest

from weft.engine.checkpoint.manifest_form import MOST_AXES, MOST_ELEMENTS, FormError, _tensor


@pytest.mark.parametrize("shape", [[0, MOST_ELEMENTS], [0] * MOST_AXES, [0]])
def test_the_largest_shapes_are_taken(shape):
    assert list(_tensor({"shape": shape, "dtype": "F32", "pieces": []}, {}).shape) == shape


@pytest.mark.parametrize("shape", [[0, MOST_ELEMENTS + 1], [0, 2, MOST_ELEMENTS], [0] * (MOST_AXES + 1), [-1], [True]])
def test_larger_ones_are_refused(shape):
    with pytest.raises(FormError, match="shape="):
        _tensor({"shape": shape, "dtype": "F32", "pieces": []}, {})
