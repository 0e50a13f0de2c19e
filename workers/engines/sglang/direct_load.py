"""All weights of a plain model in one bucket: copied into its live parameters at once.

SGLang gives every tensor to the model's own code, which looks for its place and asks for a copy of
it. Where there are many small ones that takes longer than all the copies. Here the places are those
that the checksums are taken from, see ``live_weights``. That they are the right ones is proved by
SGLang itself: it loads the first bucket, and every tensor must be found in its place afterwards.
Runs inside a scheduler, so it imports nothing but torch and its neighbors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.engines.sglang.live_weights import extent, parameters_of, process_tensors
from workers.fingerprint import fingerprints

PLAIN = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of models that compute with their parameters alone, and keep nothing made of them."""


class DirectLoad:
    """The loading of buckets of one model in one process."""

    def __init__(self, config: Mapping[str, Any], processes: int) -> None:
        """``config``: the model's ``config.json``; ``processes``: tensor-parallel ones."""
        self._config = config
        self._possible = processes == 1
        self._proved: Any = None
        """The model whose tensors were found in their places."""

    def load(self, model: Any, flat: Tensor, metadata: Sequence[Any]) -> None:
        """Bring the tensors of a bucket to the parameters of ``model``.

        Args:
            model: an SGLang model; its ``load_weights`` does what is not done here.
            flat: [bytes] of the bucket.
            metadata: what lies where in it, as SGLang's ``FlattenedTensorMetadata``.
        """
        sizes = [each.end_idx - each.start_idx for each in metadata]
        tensors = [
            (each.name, part.view(each.dtype).view(each.shape))
            for each, part in zip(metadata, flat.split(sizes), strict=True)
        ]
        places = _Places.of(model, self._config) if self._possible else None
        if places is None or not places.fit(tensors):
            model.load_weights(tensors)
        elif self._proved is model:
            places.fill(tensors)
        else:
            model.load_weights(tensors)
            self._possible = places.hold(tensors)
            self._proved = model if self._possible else None
        if flat.is_cuda:
            # Whoever is told that it is loaded fills the memory anew.
            torch.cuda.current_stream(flat.device).synchronize()


class _Places:
    """Where a model keeps every tensor of its files."""

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._padding: list[Tensor] = []

    @classmethod
    def of(cls, model: Any, config: Mapping[str, Any]) -> "_Places | None":
        """Those of a model of ``PLAIN``; None for any other."""
        if type(model).__name__ not in PLAIN:
            return None
        places = cls()
        for name, tensor in process_tensors(parameters_of(model), config, 1):
            found = extent(name, config)
            whole = tensor.shape[found.dimension] if found is not None else 0
            if found is None or whole <= found.size:
                places._views[name] = tensor
                continue
            sizes = [found.size, whole - found.size]
            places._views[name], padding = tensor.split(sizes, found.dimension)
            places._padding.append(padding)
        return places

    def fit(self, tensors: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether ``tensors`` are all there are, each of its place's shape and type."""
        return len(tensors) == len(self._views) and all(
            (place := self._views.get(name)) is not None
            and place.shape == tensor.shape
            and place.dtype == tensor.dtype
            for name, tensor in tensors
        )

    def fill(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy each of them to its place; padding is zero, as SGLang leaves it."""
        targets = [self._views[name] for name, _ in tensors]
        with torch.no_grad():
            torch._foreach_copy_(targets, [tensor for _, tensor in tensors])
            for padding in self._padding:
                padding.zero_()

    def hold(self, tensors: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether each of them lies in its place."""
        return fingerprints(tensors) == fingerprints(self._views.items())
