"""Small models, and dmuon put on them: on the CPU, or on a stand-in for a GPU where the process has one."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support import fake_gpu

DEVICE = "cuda" if fake_gpu.present() else "cpu"
if DEVICE == "cuda":
    fake_gpu.install()


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Toy(nn.Module):
    """Embedding, residual blocks, head. `batch`: token ids; answers with the loss of predicting the next one."""

    def __init__(self, width=16, hidden=40, depth=3, vocabulary=23):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def logits(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def forward(self, batch):
        logits = self.logits(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def projections(name, parameter):
    return "proj" in name and parameter.ndim >= 2


def make(build=Toy, seed=0, **kwargs):
    torch.manual_seed(seed)
    return build(**kwargs).to(DEVICE)


def batches(count, size=8, length=9, vocabulary=23, seed=1):
    """`count` batches of token ids, the same on every rank; `shard` gives a rank its part."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (size, length), generator=generator).to(DEVICE) for _ in range(count)]


def shard(batch, rank, world_size):
    return batch.chunk(world_size)[rank]


def dedicate(model, world_size, z3, predicate=projections, fsdp_layers=True, muon=None, device=DEVICE, **options):
    """dedicate_params, fully_shard and Muon as the guide has them."""
    import dmuon

    mesh = init_device_mesh(device, (world_size,))
    dmuon.dedicate_params(model, mesh, predicate, reshard_after_forward=z3, **options)
    if fsdp_layers:
        for layer in getattr(model, "layers", []):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dmuon.Muon(model, **(muon or {}))


def close(model):
    """Ends the session, so that the next test starts from nothing."""
    import dmuon

    dmuon.get_comm_ctx(model).close()


def weights(model):
    """All weights as numpy arrays by name, on every rank."""
    import dmuon

    full = dmuon.get_model_state_dict(model, rank0_only=False)
    return {name: value.cpu().numpy() for name, value in full.items()}
