"""Data-parallel training as it is written for Horovod; only the import is roadtrain's.

torchrun --nproc-per-node 2 examples/horovod/horovod_script.py
"""

import torch
from torch import nn

import roadtrain.hvd as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # initial values differ by worker until broadcast from the root below
torch.set_num_threads(1)

teacher = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    op=hvd.Average,
)

samples = torch.Generator().manual_seed(100 + hvd.rank())  # different data on every worker
for step in range(60):
    x = torch.randn(16, 20, generator=samples)
    loss = nn.functional.mse_loss(model(x), x @ teacher)
    optimizer.zero_grad()
    loss.backward()
    optimizer.synchronize()  # clipping needs the whole gradient
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    if step % 20 == 19:
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        seen = hvd.allreduce(torch.tensor(16 * (step + 1)), op=hvd.Sum, name="samples").item()
        if hvd.rank() == 0:
            print(f"step {step + 1}, {seen} samples, loss {mean:.4f}", flush=True)
hvd.shutdown()
