"""A training whose model is compiled."""

import torch

model = torch.compile(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
