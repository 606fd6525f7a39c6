"""Read and run QSRT packages: mixture-of-experts weights at about 3 bits."""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "FormatError": "qsrt_runtime.format.errors",
    "LayerWeights": "qsrt_runtime.weights",
    "LoadedPackage": "qsrt_runtime.load",
    "load_package": "qsrt_runtime.load",
    "moe_forward": "qsrt_runtime.moe",
    "moe_forward_reference": "qsrt_runtime.moe_reference",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing one part does not import the rest."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
