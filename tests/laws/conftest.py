"""Every test here that asks for `example` and `name` runs for every graft on every tiny backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from graftlm.grafts import GraftedModel
from laws.examples import BACKBONES, CAUSAL, Example, backbone, examples
from laws.tools import bare_logits, graft_onto, logits, randomise
from tiny import tiny_ids

Attach = Callable[..., GraftedModel]
_seen: set[tuple[str, str]] = set()  # examples on backbones whose random graft is known to change what comes out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "encoders: this law holds for encoders as well")
    config.addinivalue_line("markers", "law(name): the law's name, as exceptions call it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "example" in metafunc.fixturenames and "example" not in given:
        metafunc.parametrize("example", examples(), ids=str)
    if "name" in metafunc.fixturenames and "name" not in given:
        metafunc.parametrize("name", BACKBONES if metafunc.definition.get_closest_marker("encoders") else CAUSAL)


@pytest.fixture(autouse=True)
def _exceptions(request: pytest.FixtureRequest) -> None:
    """Skip, with the reason, where the example says that this host or law is not for it."""
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if not isinstance(example := values.get("example"), Example):
        return
    law = next((mark.args[0] for mark in request.node.iter_markers("law")), "")
    why = example.exception(str(values.get("name", "")), law)
    if why is not None:
        pytest.skip(f"{example}, {why}")


@pytest.fixture
def attach() -> Iterator[Attach]:
    """`attach(example, name)`: a graft with random weights on a backbone, taken off after the test whatever happens."""
    attached: list[GraftedModel] = []

    def attach(example: Example, name: str, *, untrained: bool = False) -> GraftedModel:
        bare = bare_logits(name)
        model = graft_onto(backbone(name), example)
        attached.append(model)
        if not untrained:
            randomise(model, example.spread)
            if (str(example), name) not in _seen:
                changed = (logits(model, tiny_ids()) - bare).abs().max()
                assert changed > 0.1, "the random graft changes too little for a law to be broken visibly"
                _seen.add((str(example), name))
        return model.eval()

    yield attach
    for model in attached:
        model.detach()
