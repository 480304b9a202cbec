"""The transformer of `_transformer` in PyTorch, and the micro-batch loop as its users write it.

Imported only where torch is installed.
"""

from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks import _measure, _transformer

Tree = Any


class Trainer:
    """Parameters and AdamW; `update` is one update from k micro-batches."""

    def __init__(self, shape: _transformer.Shape, params: Tree):
        self.shape = shape
        self.stacked = not shape.unrolled
        tree = _unstacked(jax.device_get(params), shape) if self.stacked else params
        tensor = lambda x: torch.tensor(np.array(x), requires_grad=True)  # noqa: E731
        self.params = jax.tree.map(tensor, tree)
        adamw = {"lr": _measure.ADAMW["learning_rate"], "eps": _measure.ADAMW["eps"]}
        weights = jax.tree.leaves(self.params)
        self.optimizer = torch.optim.AdamW(weights, weight_decay=1e-4, **adamw)

    def update(self, parts: list[torch.Tensor]) -> float:
        total = 0.0
        for part in parts:
            loss = self.loss(part) / len(parts)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        params, wide = self.params, torch.float32
        dtype = torch.bfloat16 if self.shape.bfloat16 else wide
        x = (params["tokens"][tokens[:, :-1]] + params["positions"]).to(dtype)
        for layer in params["layers"]:
            x = _layer(self.shape.heads, x, layer)
        logits = _norm(x, params["norm"]) @ params["head"].to(dtype)
        return functional.cross_entropy(logits.to(wide).flatten(0, 1), tokens[:, 1:].flatten())

    def tree(self) -> Tree:
        """The parameters, as NumPy arrays in the tree that was given."""
        plain = jax.tree.map(lambda x: x.detach().numpy().copy(), self.params)
        if self.stacked:
            plain["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *plain["layers"])
        return plain


def _unstacked(params: Tree, shape: _transformer.Shape) -> Tree:
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(shape.layers)]
    return params | {"layers": layers}


def tensors(parts: list[jax.Array]) -> list[torch.Tensor]:
    return [torch.tensor(np.array(part), dtype=torch.int64) for part in parts]


def _layer(heads: int, x: torch.Tensor, layer: Tree) -> torch.Tensor:
    x = x + _attention(heads, _norm(x, layer["attention_norm"]), layer)
    hidden = _norm(x, layer["mlp_norm"]) @ layer["mlp_in"].to(x.dtype)
    return x + functional.gelu(hidden, approximate="tanh") @ layer["mlp_out"].to(x.dtype)


def _attention(heads: int, x: torch.Tensor, layer: Tree) -> torch.Tensor:
    mixed = (x @ layer["attention_in"].to(x.dtype)).reshape(*x.shape[:2], 3, heads, -1)
    query, key, value = mixed.permute(2, 0, 3, 1, 4)  # each (sequences, heads, tokens, width)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).reshape(x.shape) @ layer["attention_out"].to(x.dtype)


def _norm(x: torch.Tensor, norm: Tree) -> torch.Tensor:
    shape = (x.shape[-1],)
    return functional.layer_norm(x.float(), shape, norm["scale"], norm["bias"], 1e-5).to(x.dtype)
