#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What someone's PyTorch training looks like, for tests: ResNet-18 (narrow) by DistributedDataParallel over Gloo, on
synthetic images, one process per rank. Prints the ModelArts sample's two lines; with --report it also uses paramsync.py."""
import argparse
import os
import pathlib
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

source = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(source / "tests/parity"), str(source / "services/client/python")]
from sample_model import ResNet18  # noqa: E402


def images(count, seed):
    """Two classes that differ in brightness."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=random)
    return TensorDataset(torch.rand(count, 3, 32, 32, generator=random) * 0.5 + labels.view(-1, 1, 1, 1) * 0.5, labels)


def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(3)
    with torch.no_grad():
        for x, y in loader:
            out = net(x)
            sums += torch.tensor([cross_entropy(out, y, reduction="sum").item(), (out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def train(rank, words):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(words.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(words.port))
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(ResNet18(width=8, classes=2))
    optimizer = torch.optim.Adam(net.parameters(), lr=words.lr)
    train_set, test_set = images(128, 1), images(64, 2)
    sampler = DistributedSampler(train_set, words.world, rank)
    test_loader = DataLoader(test_set, 32, sampler=DistributedSampler(test_set, words.world, rank, shuffle=False))

    def epochs(record):
        step = 0
        for epoch in range(1, words.epochs + 1):
            sampler.set_epoch(epoch)
            net.train()
            begun, losses = time.monotonic(), []
            # Workers are forked while the recorder's thread lives.
            for x, y in DataLoader(train_set, 32, sampler=sampler, num_workers=1):
                loss = cross_entropy(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                losses.append(loss.item())
                if record:
                    record.step(step, loss=losses[-1], lr=words.lr)
            mean = sum(losses) / len(losses)
            print("train | epoch: %d | loss: %.4f" % (epoch, mean), flush=True)
            train_s = time.monotonic() - begun
            val_loss, accuracy = evaluate(net, test_loader)
            print("val | epoch: %d | loss: %.4f | accuracy: %.4f \n" % (epoch, val_loss, accuracy), flush=True)
            if record:
                record.epoch(epoch, train_loss=mean, val_loss=val_loss, accuracy=accuracy, lr=words.lr,
                             samples_per_s=len(train_set) / train_s, train_s=train_s)
                if rank == 0 and words.checkpoint:
                    torch.save(net.module.state_dict(), words.checkpoint % epoch)
                    record.checkpoint(words.checkpoint % epoch, epoch, accuracy=accuracy)
            if words.crash == epoch and rank == words.world - 1:
                raise RuntimeError("out of luck")

    if words.report:
        import paramsync
        with paramsync.run(words.report, model="resnet18", dataset="synthetic", dataset_hash="seeds 1 and 2", device="cpu",
                           epochs=words.epochs, batch_per_rank=32, config={"lr": words.lr, "width": 8}) as record:
            if rank:
                assert type(record).__name__ == "Silent"
            epochs(record)
    else:
        epochs(None)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--report")
    parser.add_argument("--checkpoint")
    parser.add_argument("--crash", type=int, default=0)
    parser.add_argument("--rank", type=int)
    words = parser.parse_args()
    if words.rank is not None:
        train(words.rank, words)
        return
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)]) for rank in range(words.world)]
    statuses = [None] * words.world
    while None in statuses and not any(statuses):
        statuses = [rank.poll() for rank in ranks]
        time.sleep(0.05)  # polling the processes
    for rank in ranks:
        if any(statuses):
            rank.terminate()
        rank.wait()
    sys.exit(1 if any(statuses) else 0)


if __name__ == "__main__":
    main()
