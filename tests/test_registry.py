"""Registration, and the arguments of what is registered."""

import pytest
from torch import nn

from dkcls.layers import LAYERS, LocalDeformKernel2d
from dkcls.models.variants import Variant
from dkcls.registry import Registry
from dkcls.words import keywords


def make(place):
    """Return a class as a module defines it that is run again."""
    return type("Thing", (), {"__module__": place})


def test_a_name_is_taken_but_by_the_same_definition():
    things = Registry("thing")
    first, again, other = make("a"), make("a"), make("b")
    things.register("x", label="an x")(first)
    things.register("x")(again)
    assert things["x"] is again
    with pytest.raises(ValueError, match="there is a thing 'x' already"):
        things.register("x")(other)
    with pytest.raises(ValueError, match="thing must be one of x, got 'y'; --plugin MODULE adds"):
        things.find("y")


def test_a_name_that_nobody_registered_is_its_own_label():
    """As in a report on the run of a plug-in that is not imported."""
    things = Registry("thing")
    things.register("x", label="an x")(make("a"))
    things.register("y")(make("b"))
    assert [things.label(name) for name in "xyz"] == ["an x", "y", "z"]


class Handed(LocalDeformKernel2d):
    def __init__(self, *shape, reach=1.0, **options):
        super().__init__(*shape, **options)
        self.reach = reach


class Final(Handed):
    def __init__(self, channels, /, kernel_size, *, bias=True):
        nn.Module.__init__(self)


def test_a_class_takes_what_it_hands_on_to_its_base():
    assert keywords(Handed)[0] == "reach"
    assert set(keywords(Handed)) == {"reach", *keywords(LocalDeformKernel2d)}
    assert keywords(Final) == ["kernel_size", "bias"]
    assert keywords(nn.Conv2d)[:3] == ["in_channels", "out_channels", "kernel_size"]
    assert keywords(make) == ["place"]


def test_a_derived_layer_gets_the_variants_arguments(monkeypatch):
    monkeypatch.setitem(LAYERS._things, "handed", Handed)
    variant = Variant(spatial="handed", scope=5, grid=0.5, options={"reach": 2.0})
    layer = variant.spatial_conv(8, 1, 1, deformable=True)
    assert (layer.scope, layer.grid, layer.reach) == ((5, 5), 0.5, 2.0)
    with pytest.raises(ValueError, match="takes no 'scope'; it takes reach, backend"):
        Variant(spatial="handed", options={"scope": 5})
