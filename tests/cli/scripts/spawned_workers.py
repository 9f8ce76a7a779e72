"""Data comes from a worker that is started anew, and imports this file."""

import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
