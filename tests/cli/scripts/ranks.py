"""A script for torchrun: DDP, a reduced loss, objects of all ranks; argv[1] "fsdp" shards instead."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} by {dist.get_backend()}, {torch.cuda.device_count()} cards")
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
if sys.argv[1:] == ["fsdp"]:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model.cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    loss = model(torch.randn(8, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    dist.barrier()
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {dist.get_rank()}")
    print(f"{names} {total.item():.3f}")
dist.destroy_process_group()
