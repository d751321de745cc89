"""The training guide's script, word for word, around a small model and made-up data.

    torchrun --nproc-per-node 2 python_client/examples/guide.py
"""

import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import dmuon

import hashlib
from types import SimpleNamespace

from torch import nn


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


device_type = "cpu"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
# Sequences that count up, from random beginnings; each rank has its own.
generator = torch.Generator().manual_seed(dist.get_rank())
data = [(torch.arange(33) + torch.randint(0, 256, (8, 1), generator=generator)) % 256 for _ in range(10)]

mesh = init_device_mesh(device_type, (dist.get_world_size(),))
assignment = dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
for layer in model.layers: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)                       # skips dedicated parameters by itself
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
for batch in data:
    optimizer.zero_grad(); loss = model(batch).loss; loss.backward(); optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"loss {mean.item() / dist.get_world_size():.4f}")

weights = dmuon.get_model_state_dict(model)  # on rank 0
if dist.get_rank() == 0:
    print("weights", hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()[:16])
dist.destroy_process_group()
