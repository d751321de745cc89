"""The training guide's script on a small model: three lines of dmuon around a plain FSDP2 loop.

    torchrun --nproc-per-node 2 python_client/examples/guide.py [--z2] [--steps 10]
"""

import argparse
from types import SimpleNamespace

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import dmuon


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=64, depth=3, vocabulary=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch):
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--z2", action="store_true", help="keep the weights in memory after forward")
arguments.add_argument("--steps", type=int, default=10)
arguments = arguments.parse_args()

device_type = "cpu"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
generator = torch.Generator().manual_seed(dist.get_rank())
pattern = torch.arange(33)
data = [
    (pattern + torch.randint(0, 256, (8, 1), generator=generator)) % 256 for _ in range(arguments.steps)
]  # sequences that count up, from random beginnings: each rank has its own

mesh = init_device_mesh(device_type, (dist.get_world_size(),))
assignment = dmuon.dedicate_params(
    model,
    mesh,
    predicate=lambda n, p: "proj" in n and p.ndim == 2,
    reshard_after_forward=not arguments.z2,
)
for layer in model.layers: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)                       # skips dedicated parameters by itself
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
for batch in data:
    optimizer.zero_grad(); loss = model(batch).loss; loss.backward(); optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"loss {loss.item() / dist.get_world_size():.4f}")

dist.destroy_process_group()
