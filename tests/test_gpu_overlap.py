"""Launches that overlap (programmatic dependent launch): a product never reads what is not yet written, nor writes what is
still being read, whatever comes before it in the stream, in a graph or out of it."""

import pytest
import reference as ref

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

# M, N, K of y = x @ w.T, then z = y @ v.T with v of the shape K, N: plans of every kind follow one another.
CHAINS = {
    "decode": (16, 4096, 1024),
    "one row": (1, 8192, 2048),
    "few tiles": (256, 512, 4096),
    "split": (64, 64, 32768),
    "cluster split": (128, 2112, 3584),
    "many tiles": (2048, 2048, 512),
    "copies": (130, 333, 517),
    "odd K": (64, 1024, 1027),
}


def chain(name):
    """Inputs of two contents, weights of both products, and what the second one gives."""
    m, n, k = CHAINS[name]
    xs = [ref.torch_integers((m, k), "bfloat16") for _ in range(2)]
    w = torch.eye(n, k, device="cuda", dtype=torch.bfloat16)
    w[:, :: max(1, k // 7)] = 1
    v = torch.eye(k, n, device="cuda", dtype=torch.bfloat16)
    v[:, :: max(1, n // 5)] = 1
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    z = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    expected = []
    for x in xs:
        tcgemm.matmul(x, w.T, out=y)
        torch.cuda.synchronize()
        tcgemm.matmul(y, v.T, out=z)
        torch.cuda.synchronize()
        # A few terms a sum: exact before its rounding.
        assert torch.equal(y, (x.double() @ w.double().T).to(torch.bfloat16))
        assert torch.equal(z, (y.double() @ v.double().T).to(torch.bfloat16))
        expected.append(z.clone())
    assert not torch.equal(*expected)
    return xs, w, v, y, z, expected


def rounds(request, quick, slow):
    return slow if request.config.getoption("--slow") else quick


@pytest.mark.parametrize("name", CHAINS)
def test_products_in_a_chain(name, request):
    xs, w, v, y, z, expected = chain(name)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(rounds(request, 600, 20_000)):
        tcgemm.matmul(xs[i % 2], w.T, out=y)
        tcgemm.matmul(
            y, v.T, out=z
        )  # reads what the product before wrote; the next one overwrites what this one reads
        if i % 3 == 0:  # else the next product follows at once
            wrong += (z != expected[i % 2]).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", CHAINS)
def test_after_another_kernel(name, request):
    """A framework's kernel writes the operand right before, and the result right after."""
    xs, w, v, y, z, expected = chain(name)
    x = xs[0].clone()
    products = []
    for each in xs:
        tcgemm.matmul(each, w.T, out=y)
        products.append(y.clone())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(rounds(request, 600, 20_000)):
        x.copy_(xs[i % 2])
        tcgemm.matmul(x, w.T, out=y)
        wrong += (y != products[i % 2]).any()
        y.zero_()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", CHAINS)
def test_in_a_graph(name):
    xs, w, v, y, z, expected = chain(name)
    x, seen = torch.empty_like(xs[0]), torch.empty_like(z)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y.zero_()
        for _ in range(3):
            tcgemm.matmul(x, w.T, out=y)
            tcgemm.matmul(y, v.T, out=z)
            seen.copy_(z)  # a copy node between two products
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = tcgemm.matmul(x, w.T)
        again = tcgemm.matmul(x, w.T)
        torch.cuda.current_stream().wait_stream(side)
        both = other - again
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(100):
        x.copy_(xs[i % 2])
        graph.replay()
        wrong += (seen != expected[i % 2]).any() + (both != 0).any() + (again != y).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", CHAINS)
def test_two_streams(name, request):
    """Products that share the device: the same bits every time."""
    xs, w, v, y, z, expected = chain(name)
    lanes = []
    for index in range(2):
        stream = torch.cuda.Stream()
        lanes.append((stream, xs[index], torch.empty_like(y), torch.empty_like(z), expected[index]))
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in lanes]
    torch.cuda.synchronize()
    for i in range(rounds(request, 300, 10_000)):
        for count, (stream, x, middle, result, right) in zip(wrong, lanes):
            with torch.cuda.stream(stream):
                tcgemm.matmul(x, w.T, out=middle)
                tcgemm.matmul(middle, v.T, out=result)
                count += (result != right).any()
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0]
