"""More than a small card holds; `--recover` tries half the rows."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 65536), nn.GELU(), nn.Linear(65536, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 32768
while True:
    try:
        torch.cuda.reset_peak_memory_stats()
        hidden = model[:2](torch.randn(rows, 1024, device="cuda"))  # the line that does not fit
        model[2](hidden).sum().backward()
        optimizer.step()
    except torch.cuda.OutOfMemoryError:
        if "--recover" not in sys.argv:
            raise
        rows //= 2
        torch.cuda.empty_cache()
