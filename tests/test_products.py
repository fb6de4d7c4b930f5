"""oneDNN's products against torch's, and their gradients."""

import pytest
import torch
import torch.nn.functional as F

from qfleet import products


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)
    monkeypatch.setattr(products, "LARGE", 0)


@pytest.mark.parametrize("shape", [(5, 12), (1, 12), (3, 4, 12)])
@pytest.mark.parametrize("to_input", [False, True])
def test_a_layer_and_its_gradients(shape: tuple[int, ...], to_input: bool) -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(7, 12, generator=g), torch.randn(7, generator=g)
    x, up = torch.randn(shape, generator=g), torch.randn(*shape[:-1], 7, generator=g)
    results = []
    for layer in (products.linear, F.linear):
        inputs = [x.clone().requires_grad_(to_input), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        out = layer(*inputs)
        out.backward(up)
        results.append([out.detach(), *(each.grad for each in inputs if each.grad is not None)])
    assert len(results[0]) == len(results[1]) == 3 + to_input
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_small_products_mixed_precision_and_compilation_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(products, "_onednn", lambda x, w, b: called.append(1) or F.linear(x, w, b))
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    products.linear(x, weight, bias)
    assert called == [1]
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16
    assert products.linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    monkeypatch.setattr(products, "LARGE", 5 * 12 * 7 + 1)
    products.linear(x, weight, bias)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(products, "LARGE", 0)
    products.linear(x, weight, bias)
    assert called == [1]
