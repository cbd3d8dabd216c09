"""Which sequences come together in a batch, and how they come to one length."""

from __future__ import annotations

from ptfast.techniques.record import Technique

_LINES = (
    "data=text_file",
    "data.path={text}",
    "data.documents=lines",
    "data.context_length=96",
    "model=gpt",
    "model.width=32",
    "model.depth=1",
    "batch_size=4",
    "optimizer.lr=0.01",
)
"""A small language model on the lines of a text, which are of unequal length."""

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="dynamic padding",
        family="batching",
        kind="reordered",
        on=("batching=longest",),
        off=("batching=none",),
        why="A batch is as long as its longest text and not as the longest of all; padding costs as much as "
        "text.",
        claim="BERT-base on MNLI, texts up to 512 tokens, on a P100: 393 minutes become 84. A 4-layer "
        "encoder here, batch 16, texts of 8 to 256 tokens: 2.1x.",
        source="Benesty 2020, 'Divide Hugging Face Transformers training time by 2 or more with dynamic "
        "padding and uniform length batching'; measured here on one CPU core, scripts/bench_data.py text.",
        avoid="Kernels are compiled or searched for each length: pad to a multiple of 64, or to one length.",
        audit="padding='max_length' in a tokenizer's call, or a collate function that pads to a constant.",
        options=("batching/longest",),
        alternatives="batching",
        needs=("sequences",),
        trial=_LINES,
    ),
    Technique(
        name="padding to a multiple",
        family="batching",
        kind="reordered",
        on=("batching.multiple=8",),
        off=("batching.multiple=1",),
        why="Tensor cores work on tiles of eight, and lengths that are multiples of 64 are few, so that "
        "little is compiled again.",
        claim="Half-precision matrix products reach their full rate on NVIDIA GPUs before Ampere, and their "
        "best on later ones, only at multiples of 8 elements.",
        source="NVIDIA, Matrix Multiplication Background User's Guide, 'Tensor Core Requirements'.",
        avoid="On a CPU, or texts of a few tokens, of which it would be mostly padding.",
        audit="Batches of odd lengths in half precision on a GPU, or a compiled model that compiles again "
        "and again.",
        needs=("sequences",),
        trial=(*_LINES, "batching=longest"),
    ),
    Technique(
        name="uniform-length batches",
        family="batching",
        kind="training",
        on=("batching=buckets",),
        off=("batching=longest",),
        why="Texts of like length come together, so that next to nothing of a batch is padding.",
        claim="BERT-base on MNLI: 56 minutes instead of 84 with dynamic padding alone and 393 without "
        "either. A 4-layer encoder here, as for dynamic padding: 6.1x over padding to one length, 1.6 % "
        "padding; SST-2 at batch 64: 1.5 % against 57 % in a random order.",
        source="Benesty 2020, as for dynamic padding; Khomenko et al. 2016, arXiv:1708.05604; measured here "
        "on one CPU core, scripts/bench_data.py text.",
        avoid="Length tells classes apart: batches are then of one class mostly. Or texts of one length.",
        audit="More than a tenth of the tokens of a batch are padding.",
        options=("batching/buckets",),
        alternatives="batching",
        needs=("sequences",),
        trial=_LINES,
    ),
    Technique(
        name="token-budget batches",
        family="batching",
        kind="training",
        on=("batching=tokens", "batching.batch_tokens=256"),
        off=("batching=longest", "batching.batch_tokens=null"),
        why="Every step does the same work: many short texts or few long ones, and memory is full at either.",
        claim="How the original Transformer was trained: batches of about 25,000 source and 25,000 target "
        "tokens, of sentences of like length.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 5.1.",
        avoid="A learning rate tuned to batches of so many samples is to be kept.",
        audit="Batches of a fixed number of texts whose step time and memory vary severalfold.",
        options=("batching/tokens",),
        alternatives="batching",
        needs=("sequences",),
        trial=_LINES,
    ),
    Technique(
        name="sequence packing",
        family="batching",
        kind="training",
        on=("batching=pack",),
        off=("batching=longest",),
        why="Documents lie side by side in windows of one length, so that next to nothing is padding and "
        "there is one shape.",
        claim="BERT-large pretraining twice as fast, at sequences of 512 of which half had been padding, on "
        "IPUs.",
        source="Krell, Kosec, Perez, Fitzgibbon 2021, arXiv:2107.02027.",
        avoid="Documents of one length, or much longer than the context. Attention under a mask misses the "
        "quickest kernels of a GPU.",
        audit="A language model whose batches hold a document a row, padded to the context length.",
        options=("batching/pack",),
        alternatives="batching",
        needs=("sequences",),
        trial=_LINES,
    ),
    Technique(
        name="tokens kept on disk",
        family="batching",
        kind="exact",
        on=(),
        off=(),
        why="A text is tokenised once; later runs read its token ids under the hash of text and tokenizer.",
        claim="No published figure: it saves the tokenizer's time at every start but the first.",
        source="Common practice, such as the map cache of Hugging Face datasets.",
        avoid="Never: texts below a million characters are left out, and a damaged entry is made anew.",
        audit="A tokenizer called in __getitem__, or at every start.",
        needs=("sequences",),
    ),
)
