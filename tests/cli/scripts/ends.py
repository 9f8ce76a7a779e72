"""Scripts that end otherwise: as the argument says."""
# As users write.
# ruff: noqa: PTH123, SIM115

import sys

import torch

if sys.argv[1] == "exit":
    sys.exit(3)
elif sys.argv[1] == "missing":
    open("data/train.bin", "rb").read()
elif sys.argv[1] == "package":
    import a_package_that_nobody_has  # noqa: F401
elif sys.argv[1] == "selects":
    x = torch.rand(10, device="cuda")
    print(x[x > 0].sum())
elif sys.argv[1] == "selects much":
    weight = torch.ones(10**9, device="cuda", requires_grad=True)
    weight[weight > 0].sum().backward()
elif sys.argv[1] == "by hand":  # without an optimizer of torch
    weight = torch.ones(256, 256, device="cuda", requires_grad=True)
    while True:
        (weight @ weight).sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
elif sys.argv[1] == "second card":
    torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0, 1])(torch.rand(4, 8))
elif sys.argv[1] == "safetensors":
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, "weights.safetensors")
elif sys.argv[1] == "bytes of safetensors":
    from safetensors.torch import save

    save({"weight": torch.ones(3, device="cuda")})
