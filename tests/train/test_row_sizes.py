"""Which rows of a batch are large is read from samples' bytes, widths without padding, and integers."""

import pytest
import torch

from memkit.train.row_sizes import row_sizes, rows_in_turn
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.split import pick_rows

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 1, 1, 1], [1, 5, 6, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("entry", "sizes"),
    [
        (TOKENS, [4, 1, 2, 0]),
        (TOKENS + 49, [4, 1, 2, 0]),  # padded with another number
        (TOKENS.flip(1), [4, 1, 2, 0]),  # at the other end
        (TOKENS[..., None].expand(4, 4, 2), [8, 2, 4, 0]),
        (torch.ones(4, 3).tril().bool(), [1, 2, 3, 3]),
        (torch.ones(4, 3).tril().long(), [1, 2, 3, 3]),
        (torch.tensor([3, 9, 2, 4]), [3, 9, 2, 4]),
    ],
    ids=str,
)
def test_sizes_of_tensors(entry, sizes):
    (found,) = row_sizes((torch.ones(4, 2), entry, torch.ones(4, 3, dtype=torch.uint8)))
    assert found.values == sizes
    assert found.limit == (entry[0].numel() if entry.dim() > 1 else float("inf"))


def test_samples_come_first_then_wide_entries():
    batch = mark_samples(([torch.ones(each, 2) for each in (1, 3, 2, 1)], torch.tensor([1, 2, 3, 9]), TOKENS))
    found = row_sizes(batch)
    assert [each.values for each in found] == [[8, 24, 16, 8], [4, 1, 2, 0], [1, 2, 3, 9]]
    rows = rows_in_turn([each.order() for each in found], 3)
    assert rows == [1, 0, 3]
    images, numbers, _ = unmark_samples(pick_rows(batch, sorted(rows), num_rows=4))
    assert [len(each) for each in images] == [1, 3, 1]
    assert numbers.tolist() == [1, 2, 9]


def test_tensors_without_data_tell_nothing():
    assert row_sizes(TOKENS.to("meta")) == []
