"""A worker: DDP whose gradients are summed by all workers and a spare host. run.sh starts two."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import roadtrain

STEPS = 60
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
model = DistributedDataParallel(model.append(nn.Linear(256, 4)))
# The new lines: gradients go to the summation service, in place of gloo's all-reduce.
summation = roadtrain.Summation(spares=["127.0.0.1:7010"], token="runs/ddp-spares/token")
model.register_comm_hook(summation, roadtrain.sum_hook)

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
teacher = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
samples = torch.Generator().manual_seed(100 + rank)  # other data on each worker
for step in range(STEPS):
    x = torch.randn(64, 32, generator=samples)
    loss = cross_entropy(model(x), (x @ teacher).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 20 == 0:
        print(f"step {step + 1}, loss {loss:.4f}", flush=True)
summation.close()
torch.distributed.destroy_process_group()
