"""Recording of offsets: which ones, of which layer, and only when somebody asks."""

import pytest
import torch
from torch import nn

from dkcls.layers import record_offsets
from tests.layers.common import MOVING, build, image, stir


def net() -> nn.Sequential:
    return nn.Sequential(
        *(stir(build(key)) for key in MOVING),
        build("static"),
        build("cond"),
        nn.Conv2d(6, 6, 1).double(),
    )


def test_every_moving_layer_is_recorded_and_nothing_else():
    model, x = net(), image()
    with record_offsets(model) as records:
        assert records == {}
        model(x)
    assert list(records) == [str(i) for i in range(len(MOVING))]
    for i, key in enumerate(MOVING):
        record, layer = records[str(i)], model[i]
        kernel = getattr(layer, "kernel_generator", None)
        assert (record.kernel_offset is None) == (record.clipped is None) == (kernel is None)
        assert (record.image_offset is None) == (key not in ("dcn", "dcn_local_dk"))
        if kernel is not None:
            assert torch.equal(record.kernel_offset, kernel(x))
            assert not record.kernel_offset.requires_grad
        x = layer(x)


def test_nothing_is_recorded_outside():
    model = net()
    with record_offsets(model) as records:
        pass
    model(image())
    assert records == {}
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="inside"), record_offsets(model):
        raise RuntimeError("inside")
    assert not any(module._forward_hooks for module in model.modules())


def test_the_last_forward_pass_counts():
    model = build("local_dk")
    with record_offsets(model) as records:
        model(image())
        assert not records[""].kernel_offset.any()
        stir(model)
        model(image())
    assert records[""].kernel_offset.any()


@pytest.mark.parametrize("key", ["local_dk", "global_dk", "global_dk_dense"])
def test_clipped_is_the_share_strictly_outside_the_scope(key):
    layer = build(key, kernel_size=(3, 2), scope=(3, 5))  # grid: y 0, 1, 2; x 1.5, 2.5
    bias = torch.zeros(3, 2, 2, dtype=torch.float64)  # taps by (y, x)
    with record_offsets(layer) as records:
        layer(image())
        assert records[""].clipped == 0  # at the border is not outside
        bias[0, 0, 0] = -0.1  # y = -0.1
        bias[2, 1, 0] = 0.1  # y = 2.1
        bias[1, 1, 1] = 1.6  # x = 4.1
        bias[1, 0, 1] = -1.5  # x = 0
        layer.kernel_generator.bias.data.copy_(bias.flatten())
        layer(image())
    torch.testing.assert_close(records[""].clipped.item(), 3 / 12)


def test_clipped_counts_from_the_layers_grid():
    # The grid has y at 0, 2, 4 and x at 0, 3.
    layer = build("local_dk", kernel_size=(3, 2), scope=(5, 4), grid="spread")
    bias = torch.zeros(3, 2, 2, dtype=torch.float64)
    bias[0, 0, 1] = -0.1  # x = -0.1
    bias[1, 1, 1] = 0.1  # x = 3.1
    bias[1, 0, 1] = 3.0  # x = 3
    bias[0, 1, 0] = -0.1  # y = -0.1
    bias[1, 1, 0] = 1.9  # y = 3.9
    layer.kernel_generator.bias.data.copy_(bias.flatten())
    with record_offsets(layer) as records:
        layer(image())
    torch.testing.assert_close(records[""].clipped.item(), 3 / 12)


def test_a_compiled_model_is_recorded_too():
    torch.compiler.reset()
    model = nn.Sequential(stir(build("local_dk")))
    compiled, x = torch.compile(model, backend="eager"), image()
    out = compiled(x)
    with record_offsets(compiled) as records:
        torch.testing.assert_close(compiled(x), out)
    assert torch.equal(records["0"].kernel_offset, model[0].kernel_generator(x))
    records.clear()
    compiled(x)
    assert records == {}
