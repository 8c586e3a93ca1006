"""Data-parallel training as it is written for BytePS; only the import is roadtrain's.

torchrun --nproc-per-node 2 examples/horovod/byteps_script.py
"""

import torch
from torch import nn

import roadtrain.hvd as bps

bps.init()
torch.manual_seed(
    bps.local_rank()
)  # initial values differ by worker until broadcast from the root below
torch.set_num_threads(1)
STEPS = 30

model = nn.Sequential(
    nn.Embedding(50, 16), nn.Flatten(), nn.Linear(4 * 16, 64), nn.ReLU(), nn.Linear(64, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 * bps.size())
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
# the next forward begins while gradients of later layers are still being sent
optimizer = bps.CrossBarrier(
    model, optimizer, named_parameters=model.named_parameters(), num_steps=STEPS
)


def right(x, y):
    return (model(x).argmax(1) == y).double().mean()


words = torch.Generator().manual_seed(100 + bps.rank())  # different data on every worker
for step in range(STEPS):
    x = torch.randint(50, (32, 4), generator=words)
    y = (x[:, 0] + x[:, 1] > 50).long()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        mean = bps.push_pull(loss.detach(), average=True, name="loss").item()
        share = bps.push_pull(right(x, y), name="accuracy").item()
        if bps.rank() == 0:
            print(f"step {step + 1}, loss {mean:.4f}, accuracy {share:.3f}", flush=True)
bps.shutdown()
