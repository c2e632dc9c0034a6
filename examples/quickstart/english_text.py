"""Builds a Megatron data set of English text that every Python installation has.

The text is that of Python's reference manual as ``pydoc`` shows it (about 700 kB), a document for
each topic; every byte is a token. It is the same for the same version of Python.

    python examples/quickstart/english_text.py data/english
    ... --data-path data/english --tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256  # The first number that is no byte.
VOCAB_SIZE = 257


def documents() -> list[list[int]]:
    """Every document as token ids: the bytes of its text and the end mark."""
    return [[*text.encode(), END_OF_DOCUMENT] for _, text in sorted(topics.items())]


def build(prefix: Path) -> int:
    """Writes ``prefix.bin`` and ``prefix.idx``.

    Args:
        prefix: Path without an extension, as ``--data-path`` takes it.

    Returns:
        The number of tokens.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    texts = documents()
    for tokens in texts:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return sum(map(len, texts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prefix", type=Path, help="path of the data set, without an extension")
    prefix = parser.parse_args().prefix
    print(f"{prefix}: {build(prefix):,} tokens; train with --data-path {prefix}")
