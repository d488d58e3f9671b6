"""A training loop of one's own: a model in the form of nanochat's with squared ReLU, sparse by two calls of twell.

    python examples/nanochat.py --text ~/books --out runs/nano

The same command resumes a run, from OUT/state.pt. OUT/chart.png and OUT/log.jsonl have losses and non-zeros.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from runs import NON_ZEROS, Sequences, Text, chart, new_tokenizer, tokenised
from torch import Tensor, nn

import twell
from twell import recipe
from twell.base import files
from twell.commands.request import at_least, exit_status, number_above

SIZES = {"depth": 4, "heads": 8, "vocab": 4096, "sequence": 256, "batch": 16, "steps": 500, "every": 10}


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Linear(width, 4 * width, False), Linear(4 * width, width, False)

    def forward(self, x: Tensor) -> Any:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = Linear(width, 3 * width, False), Linear(width, width, False), MLP(width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(F.rms_norm(x, x.shape[-1:]))


class GPT(nn.Module):
    def __init__(self, vocab: int, depth: int, width: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks, self.lm_head = nn.ModuleList(Block(width) for _ in range(depth)), Linear(width, vocab, False)

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.wte(ids) + self.wpe.weight[: ids.shape[1]]).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, x.shape[-1:])).float()[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main(arguments: list[str] | None = None) -> int:
    return exit_status("nanochat.py", lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser("nanochat.py", description=__doc__, allow_abbrev=False)
    for name, default in {**SIZES, "nnz": 30.0, "lr": 0.02}.items():
        kind = at_least(1) if isinstance(default, int) else number_above(0)
        parser.add_argument(f"--{name}", type=kind, default=default, help="(%(default)s)")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    choice = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = Text(choice.text, max_mb=64)
    text.without = str(choice.out)
    tokenizer = new_tokenizer(text, choice.vocab)
    data = Sequences("training", tokenised(text, tokenizer)[0], choice.sequence)
    given = {name: str(value) for name, value in vars(choice).items() if name != "out"} | {"text": data.content}
    torch.manual_seed(0)
    model = GPT(len(tokenizer), choice.depth, 32 * choice.heads, choice.sequence).to(device)
    # before optimizers, DDP and torch.compile: sparse layers, and a target of non-zeros per token
    twell.sparsify_(model, names=("c_fc", "c_proj"))
    recipe.record_aux(model, inputs=True)
    target = recipe.TargetSparsity(choice.nnz, choice.steps, of="gate")
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [*model.wte.parameters(), *model.wpe.parameters(), *model.lm_head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=choice.lr), torch.optim.AdamW(others, lr=choice.lr, betas=(0.8, 0.95))]
    history, begun = list[Any](), 0
    parts: dict[str, Any] = {"model": model, "target": target, "muon": optimizers[0], "adamw": optimizers[1]}
    if (choice.out / "state.pt").exists():
        saved = torch.load(choice.out / "state.pt", map_location=device)
        if saved["given"] != given:
            raise ValueError(f"--out: expected a run of {given}, got one of {saved['given']}; name another folder")
        history, begun = saved["history"], saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(begun, choice.steps):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randint(len(data), (choice.batch,), generator=draw, device="cpu").tolist()
        loss = model(torch.stack([data[row]["input_ids"] for row in rows]).to(device))
        (loss + target.term(model)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        target.update()
        if (step + 1) % choice.every == 0 or step + 1 == choice.steps:
            history.append({"step": step + 1, "loss": loss.item(), NON_ZEROS: target.read()["non_zeros"]})
            print("step {step:6}  loss {loss:.4f}  non-zeros {sparsity_l0:.1f}".format(**history[-1]), flush=True)
            chart(history, choice.out)
            state = {"history": history, "step": step + 1, "given": given}
            with files.replacing(choice.out / "state.pt") as partial:
                torch.save(state | {name: part.state_dict() for name, part in parts.items()}, partial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
