"""A training script as many are: data loader with workers, mixed precision, log file, checkpoints."""
# As users write.
# ruff: noqa: PTH103, PTH118, LOG015, G004

import argparse
import logging
import os
import sys

import torch
import torch.nn.functional as F
from layers import perceptron
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out", default="runs/first")


def main():
    args = parser.parse_args()
    print("arguments", sys.argv)
    assert torch.cuda.is_available()
    os.makedirs(args.out, exist_ok=True)
    logging.basicConfig(filename=os.path.join(args.out, "train.log"), level=logging.INFO)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=1, pin_memory=True)
    model = perceptron(args.width).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        x, y = x.cuda(non_blocking=True), y.to(0)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        logging.info(f"step {step} loss {loss.item():.4f} {loss:.3f} {loss.detach().cpu().numpy()}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{args.out}/last.pt")
        state = torch.load(f"{args.out}/last.pt", map_location="cuda")
        assert next(iter(state["model"].values())).is_cuda
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.step(optimizer)
        scaler.update()
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
