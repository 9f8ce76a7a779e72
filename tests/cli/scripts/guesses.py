"""A training that reads numbers from the card: for its log, for its best loss, and, if told so, for a size."""
# As users write.

import sys

import torch
from torch import nn

words = torch.rand(64, 8, device="cuda").mul(1000).long()
size = int(words.max()) + 1 if "size" in sys.argv else 100
embedding, head = nn.Embedding(size, 16).cuda(), nn.Linear(16, 10).cuda()
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()])
best, losses = float("inf"), []
for step in range(20):
    logits = head(embedding(words % size).mean(1))
    loss = nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long, device="cuda"))
    if not torch.isfinite(loss):
        sys.exit("the loss is not finite")
    optimizer.zero_grad()
    if "lost" not in sys.argv:
        loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if loss.item() < best:
        best = loss.item()
        torch.save(head.state_dict(), "best.pt")
    print(f"step {step}: {loss.item():.3f}, {sum(losses) / len(losses):.3f}, best {best:.3f}")
