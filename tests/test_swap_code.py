"""swap: what the code of a layer writes to, and what it asks its class for, as its bytecode tells."""

from __future__ import annotations

from typing import Any

from torch import nn

from memkit.swap.library.reads import uses
from memkit.swap.library.writes import Followed


class Cases:
    """Each is one way that code has to write or to read."""

    scale = 1.0

    def augmented(self, x: Any) -> None:
        self.k += x

    def augmented_entry(self, x: Any) -> None:
        self.d["k"] += x

    def chosen(self, x: Any) -> None:
        (self.d if x else {})["k"] = x

    def sliced(self, x: Any) -> None:
        self.a[1:2] = x

    def comprehended(self, x: Any) -> None:
        [log.append(x) for log in self.logs]

    def unpacked(self, x: Any) -> None:
        one, _ = self.pair
        one.append(x)

    def within(self, x: Any) -> None:
        def inner() -> None:
            self.last = x

        inner()

    def handled(self, x: Any) -> Any:
        try:
            return self.f(x)
        except ValueError:
            self.errors["n"] = 1
            raise

    def deleted(self, x: Any) -> None:
        del self.d[x]

    def asked(self, x: Any) -> Any:
        return x * getattr(self, "scale") * getattr(self, "other", 1.0)  # noqa: B009

    def of_class(self, x: Any) -> Any:
        return x * type(self).scale + self.__class__.scale + Cases.scale


def test_code_is_followed() -> None:
    def of(name: str) -> Followed:
        return Followed(vars(Cases)[name], "self", Cases)

    assert of("augmented").sets == {"k"}
    assert of("within").sets == {"last"}
    written = {
        name: {".".join(filter(None, write.path)) for write in of(name).writes}
        for name in ("augmented_entry", "chosen", "sliced", "unpacked", "handled", "deleted")
    }
    assert written == {
        "augmented_entry": {"d"},
        "chosen": {"d"},
        "sliced": {"a"},
        "unpacked": {"pair"},
        "handled": {"errors"},
        "deleted": {"d"},
    }
    assert of("comprehended").writes
    assert of("asked").asks == {"scale", "other"}
    assert of("of_class").of_class == {"scale"}
    assert not of("asked").writes
    assert not of("of_class").writes


def test_torchs_own_code_is_not_looked_at() -> None:
    assert not uses(nn.BatchNorm1d).writes
