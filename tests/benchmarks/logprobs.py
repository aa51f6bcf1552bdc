"""Peak memory of log-probs with logits in chunks against whole logits, forward and backward, on a CPU.

    python tests/benchmarks/logprobs.py          # 8 rows of 1,024 tokens; about 20 GiB for whole logits
    python tests/benchmarks/logprobs.py --rows 2 --tokens 256 --json

Each path runs in a process of its own. The whole path is what a trainer does that asks the model for logits
(trl#3678): float32 logits, log-softmax, gather. Peaks are counted from before the call, hidden states excluded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from typing import Any

WIDTH = 64  # of the hidden states: what is compared grows with the vocabulary alone


def peak(status: str = "/proc/self/status") -> int:
    """Highest resident memory since the last reset, bytes."""
    with open(status) as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def measure(path: str, rows: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """One path in this process: peak bytes, log-probs and gradients."""
    import torch

    from agentr1_lite.forward import token_log_probs

    torch.manual_seed(0)
    torch.set_num_threads(1)

    class Layer(torch.nn.Linear):
        """An output layer as `forward.Head` is one."""

        vocabulary = property(lambda self: self.out_features)

        def forward(self, hidden: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
            return super().forward(hidden).float() / temperature

    head = Layer(WIDTH, vocabulary, bias=False)
    hidden = torch.randn(rows * tokens, WIDTH, requires_grad=True)
    targets = torch.randint(vocabulary, (rows * tokens,))
    weights = torch.randn(rows * tokens) / (rows * tokens)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    if path == "whole":
        logits = head(hidden).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    else:
        logprobs, _ = token_log_probs(head, hidden, targets, temperature=1.0, entropy=False)
    (logprobs * weights).sum().backward()
    return {
        "bytes": peak() - before,
        "logprobs": logprobs.detach().numpy(),
        "hidden": hidden.grad.numpy(),
        "head": head.weight.grad.numpy(),
    }


def compare(rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """Both paths: peaks in bytes, their ratio, largest difference of values and relative difference of gradients."""
    import numpy as np

    found = []
    for path in ("chunked", "whole"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (path, rows, tokens, vocabulary)))
    chunked, whole = found
    return {
        "chunked_bytes": chunked["bytes"],
        "whole_bytes": whole["bytes"],
        "ratio": whole["bytes"] / chunked["bytes"],
        "values": float(np.abs(chunked["logprobs"] - whole["logprobs"]).max()),
        "gradients": max(
            float(np.linalg.norm(chunked[k] - whole[k]) / np.linalg.norm(whole[k])) for k in ("hidden", "head")
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = compare(args.rows, args.tokens, args.vocabulary)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{args.rows} rows of {args.tokens} tokens, {args.vocabulary:,} words")
    print(f"whole logits {found['whole_bytes'] / 2**30:.2f} GiB, in chunks {found['chunked_bytes'] / 2**30:.2f} GiB")
    print(f"ratio {found['ratio']:.1f}, values within {found['values']:.1e}, gradients within {found['gradients']:.1e}")


if __name__ == "__main__":
    main()
