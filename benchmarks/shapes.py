"""What is measured: problems A[M,K] @ B[K,N] by suite. Imports nothing but the standard library."""

import random
from dataclasses import dataclass

ORDERS = ("nn", "nt", "tn", "tt")
DTYPES = ("bfloat16", "float16", "float32")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Problem:
    """`batch` products of one size. Order: for A, then B, `n` where the last axis is contiguous, `t` where the first is;
    B = W[N,K]^T is `t`."""

    m: int
    n: int
    k: int
    order: str = "nt"
    batch: int = 1

    def __str__(self):
        text = f"{self.m}x{self.n}x{self.k}"
        return text + (f"x{self.batch}" if self.batch > 1 else "") + (f":{self.order}" if self.order != "nt" else "")

    @property
    def flops(self):
        return 2 * self.m * self.n * self.k * self.batch

    def set_bytes(self, in_dtype, out_dtype=None):
        """A, B and C together."""
        inputs = (self.m * self.k + self.k * self.n) * ITEM_BYTES[in_dtype]
        return (inputs + self.m * self.n * ITEM_BYTES[out_dtype or in_dtype]) * self.batch


def drawn(count, seed):
    """Problems that nobody chose: sizes even on a logarithmic scale, M up to 4096, N and K from 16 to 16384, in half of the
    problems multiples of 8; any order."""
    draw = random.Random(seed).random  # the one method whose numbers no release of Python changes
    problems = []
    while len(problems) < count:
        step = 8 if draw() < 0.5 else 1
        m, n, k = (
            max(step, round(low * (high / low) ** draw() / step) * step)
            for low, high in ((1, 4096), (16, 16384), (16, 16384))
        )
        order = ORDERS[int(draw() * 4)]
        if m * n * k <= 1e11:
            problems.append(Problem(m, n, k, order))
    return problems


# The weights [N, K] of language models: attention, MLP and output projections from 7 to 70 billion parameters, and the
# small ones of mixture-of-experts models.
LLM_WEIGHTS = (
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (57344, 8192),
    (8192, 28672),
    (2112, 7168),
    (7168, 2048),
    (24576, 1536),
)
LLM_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

SUITES = {
    "square": [Problem(n, n, n) for n in (256, 512, 1024, 2048, 4096, 6144, 8192, 16384)],
    "llm": [Problem(m, n, k) for n, k in LLM_WEIGHTS for m in LLM_ROWS],
    "odd": [
        Problem(4095, 4095, 4095),
        Problem(4096, 4096, 4097),
        Problem(4097, 4096, 4096),
        Problem(4096, 4095, 4096),
        Problem(1000, 1000, 1000),
        Problem(1001, 1003, 1005),
        Problem(333, 777, 555),
        Problem(64, 32001, 4096),
        Problem(128, 50257, 768),
        Problem(2048, 50257, 1600),
        Problem(17, 4099, 2051),
        Problem(8191, 8193, 8190),
    ],
    "skinny": [
        Problem(1, 1, 1),
        Problem(1, 128256, 4096),
        Problem(16384, 8, 4096),
        Problem(65536, 64, 64),
        Problem(64, 64, 65536),
        Problem(128, 128, 131072),
        Problem(32768, 128, 512),
        Problem(262144, 32, 32),
        Problem(8192, 256, 8192),
    ],
    "batched": [
        Problem(1024, 1024, 1024, "nn", 16),
        Problem(512, 512, 64, "nt", 64),
        Problem(512, 64, 512, "nn", 64),
        Problem(128, 128, 128, "nn", 512),
        Problem(4096, 4096, 128, "nt", 8),
        Problem(1024, 1024, 64, "nt", 128),
        Problem(1024, 64, 1024, "nn", 128),
    ],
    "layouts": [Problem(n, n, n, order) for n in (2048, 4096, 8192) for order in ORDERS]
    + [Problem(m, 4096, 4096, order) for m in (16, 128, 1024) for order in ORDERS],
    # Outside `all`: shapes by chance, what one row, column or k more costs, and whether time ever falls as M grows.
    "random": drawn(240, seed=1),
    "cliff": [Problem(n, n, n) for n in range(4032, 4161)],
    "steps": [
        Problem(m, n, k)
        for n, k in ((4096, 4096), (2112, 7168), (28672, 4096))
        for m in (*range(1, 17), *range(24, 513, 8))
    ],
}
ALL = ("square", "llm", "odd", "skinny", "batched", "layouts")


def parse_suites(text):
    """Names of suites from `square,odd` or `all`; ValueError for others."""
    names = []
    for name in text.split(","):
        if name == "all":
            names += ALL
        elif name in SUITES:
            names.append(name)
        else:
            raise ValueError(f"suite: expected one of {', '.join(SUITES)}, all, got {name!r}")
    return list(dict.fromkeys(names))


def parse_shapes(text):
    """Problems from `MxNxK[xBATCH][:ORDER],...`; ValueError for what is none."""
    problems = []
    for part in text.split(","):
        sizes, _, order = part.strip().lower().partition(":")
        try:
            numbers = [int(size) for size in sizes.split("x")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4) or min(numbers) < 1 or (order or "nt") not in ORDERS:
            raise ValueError(f"shape: expected MxNxK[xBATCH][:nn|nt|tn|tt], got {part!r}")
        problems.append(Problem(*numbers[:3], order or "nt", *numbers[3:]))
    return problems
