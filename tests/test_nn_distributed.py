"""GroupedMLP under DDP and FSDP2: two gloo processes train as one does."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cudnn_grouped.nn import GroupedMLP, permute, unpermute

PROCESSES, STEPS, TOKENS = 2, 3, 48
HIDDEN, FFN, EXPERTS = 64, 64, 3  # two shards of unequal size


class MoE(torch.nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True)

    def forward(self, x):
        prob, experts = self.router(x).softmax(-1).topk(2)
        rows, row_prob, permutation = permute(x, experts, prob, EXPERTS)
        return unpermute(self.experts(rows, permutation.padded_offsets, row_prob), permutation)


def model(recipe, seed):
    torch.manual_seed(seed)
    return MoE(recipe)


def loss_of(module, step, rank):
    """The loss of a process's own tokens."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(PROCESSES * step + rank))
    return (module(x) - x.roll(1, dims=1)).square().mean()


def train(module, ranks):
    """Steps on the mean loss of the ranks; a module that averages gradients itself has its own rank alone."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            loss = loss_of(module, step, rank)
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def alone(recipe):
    """The parameters and losses of one process that has all tokens."""
    module = model(recipe, seed=0)
    losses = train(module, range(PROCESSES))
    return module.state_dict(), losses


def ddp(rank, recipe):
    """Starts from the parameters of rank 0."""
    module = DistributedDataParallel(model(recipe, seed=rank))
    return train(module, [rank]), module.module.state_dict()


def fsdp(rank, recipe):
    module = model(recipe, seed=0)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard(module.experts, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
    shard = module.experts.fc1_weight.to_local()
    assert shard.shape == (2 if rank == 0 else 1, 2 * FFN, HIDDEN)
    losses = train(module, [rank])
    return losses, {name: value.full_tensor() for name, value in module.state_dict().items()}


def worker(rank, kind, recipe, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    try:
        losses, state = kind(rank, recipe)
        expected, expected_losses = alone(recipe)
        assert losses == expected_losses[rank::PROCESSES]
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name
        start = model(recipe, seed=0).state_dict()
        assert not any(torch.equal(start[name], value) for name, value in state.items())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [ddp, fsdp])
def test_two_processes(kind, tmp_path):
    torch.multiprocessing.spawn(worker, (kind, "mxfp8", tmp_path / "store"), PROCESSES)
