"""What plain torch does, for docs/ddp.md: `ddp_claims.py FOLDER` under torchrun; each rank writes rank<r>.json."""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

Finding = dict[str, Any]


def build(num_layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(num_layers)))


def rows_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(number, 64, generator=torch.Generator().manual_seed(rank))


def bare_step(rank: int, *, synced: bool) -> float:
    """Return how far the ranks' weights are apart after one step of two micro-steps."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for is_last in (False, True):
        with nullcontext() if is_last and synced else model.no_sync():
            model(rows_of(rank, 4)).square().mean().backward()
    optimizer.step()
    weights = model.module[0].weight.detach()
    largest, smallest = weights.clone(), weights.clone()
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return float((largest - smallest).max())


def averaged_means(rank: int) -> Finding:
    """Return the distance of two gradients from that of all rows at once, rank 0 having 2 rows and rank 1 having 30."""
    numbers = (2, 30)
    rows = rows_of(rank, numbers[rank])
    whole = build()
    everything = torch.cat([rows_of(one, number) for one, number in enumerate(numbers)])
    whole(everything).square().sum(1).mean().backward()
    wanted, found = whole[0].weight.grad, {}
    for name, divisor in (("mean of means", len(rows)), ("sum by the number of all", sum(numbers) / len(numbers))):
        model = DistributedDataParallel(build())
        (model(rows).square().sum(1).sum() / divisor).backward()
        found[name] = float((model.module[0].weight.grad - wanted).abs().max() / wanted.abs().max())
    return found


def order_of_events(rank: int) -> list[str]:
    """Return what happened in one backward, in order: gradients that came, and buckets that left."""
    layers = build(8)
    # 16 KiB a layer and buckets of 1/32 MiB: two layers make a bucket.
    model = DistributedDataParallel(layers, bucket_cap_mb=1 / 32)
    events: list[str] = []

    def reduce(state: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        events.append("bucket")
        # Waited for here: a callback on gloo's own thread would race with the end of the process.
        distributed.all_reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / distributed.get_world_size())
        return done

    model.register_comm_hook(None, reduce)
    for number, layer in enumerate(layers):
        layer.weight.register_hook(lambda grad, number=number: events.append(f"gradient {number}"))
    for _ in range(2):  # the first backward finds the order, the second uses it
        events.clear()
        model(rows_of(rank, 4)).square().mean().backward()
    return [*events, "backward returned"]


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    began = time.monotonic()
    found = {
        "apart when synced": bare_step(rank, synced=True),
        "apart when not": bare_step(rank, synced=False),
        "means": averaged_means(rank),
        "events": order_of_events(rank),
        "seconds": time.monotonic() - began,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    sys.stdout.flush()
    # Past Python's own end: there gloo's threads sometimes outlive what they work for, and abort ("terminate called").
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
