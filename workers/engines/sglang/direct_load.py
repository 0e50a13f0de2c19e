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

_Where = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class DirectLoad:
    """The loading of buckets of one model in one process."""

    def __init__(self, config: Mapping[str, Any], processes: int) -> None:
        """``config``: the model's ``config.json``; ``processes``: tensor-parallel ones."""
        self._config = config
        self._possible = processes == 1
        self._proved: _Places | None = None
        """Where every tensor of a bucket was found after SGLang had loaded it."""

    def load(self, model: Any, flat: Tensor, metadata: Sequence[Any]) -> None:
        """Bring the tensors of a bucket to the parameters of ``model``.

        Args:
            model: an SGLang model; its ``load_weights`` does what is not done here.
            flat: [bytes] of the bucket.
            metadata: what lies where in it, as SGLang's ``FlattenedTensorMetadata``.
        """
        proved = self._proved is not None and self._proved.are_those_of(model)
        places = self._proved if proved else self._places_of(model)
        if places is None or not places.fit(metadata):
            model.load_weights(_tensors(flat, metadata))
        elif proved:
            places.fill(flat, metadata)
        else:
            tensors = _tensors(flat, metadata)
            model.load_weights(tensors)
            self._possible = places.hold(tensors)
            self._proved = places if self._possible else None
        if flat.is_cuda:
            # Whoever is told that it is loaded fills the memory anew.
            torch.cuda.current_stream(flat.device).synchronize()

    def _places_of(self, model: Any) -> "_Places | None":
        return _Places.of(model, self._config) if self._possible else None


class _Places:
    """Where a model keeps every tensor of its files."""

    def __init__(self, where: list[_Where]) -> None:
        """``where``: of the parameters that they lie in."""
        self._where = where
        self._views: dict[str, Tensor] = {}
        self._targets: dict[str, Tensor] = {}
        """The same, [elements] where they lie one after the other."""
        self._padding: list[Tensor] = []

    @classmethod
    def of(cls, model: Any, config: Mapping[str, Any]) -> "_Places | None":
        """Those of a model of ``PLAIN``; None for any other."""
        if type(model).__name__ not in PLAIN:
            return None
        places = cls(_where(model))
        for name, tensor in process_tensors(parameters_of(model), config, 1):
            found = extent(name, config)
            whole = tensor.shape[found.dimension] if found is not None else 0
            view = tensor
            if found is not None and whole > found.size:
                sizes = [found.size, whole - found.size]
                view, padding = tensor.split(sizes, found.dimension)
                places._padding.append(padding)
            places._views[name] = view
            places._targets[name] = view.view(-1) if view.is_contiguous() else view
        return places

    def are_those_of(self, model: Any) -> bool:
        """Whether every parameter of ``model`` lies where it lay."""
        return self._where == _where(model)

    def fit(self, metadata: Sequence[Any]) -> bool:
        """Whether they are of all tensors there are, each of its place's shape and type."""
        return len(metadata) == len(self._views) and all(
            (place := self._views.get(each.name)) is not None
            and place.shape == each.shape
            and place.dtype == each.dtype == metadata[0].dtype
            for each in metadata
        )

    def fill(self, flat: Tensor, metadata: Sequence[Any]) -> None:
        """Copy what fits to its places; padding is zero, as SGLang leaves it."""
        dtype = metadata[0].dtype
        sizes = [(each.end_idx - each.start_idx) // dtype.itemsize for each in metadata]
        targets = [self._targets[each.name] for each in metadata]
        parts = flat.view(dtype).split(sizes)
        sources = [part.view(to.shape) for part, to in zip(parts, targets, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
            for padding in self._padding:
                padding.zero_()

    def hold(self, tensors: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether each of them lies in its place."""
        return fingerprints(tensors) == fingerprints(self._views.items())


def _where(model: Any) -> list[_Where]:
    """Address and layout of every parameter."""
    return [
        (each.data_ptr(), each.dtype, tuple(each.shape), each.stride())
        for _, each in parameters_of(model)
    ]


def _tensors(flat: Tensor, metadata: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, views of it, by name."""
    sizes = [each.end_idx - each.start_idx for each in metadata]
    return [
        (each.name, part.view(each.dtype).view(each.shape))
        for each, part in zip(metadata, flat.split(sizes), strict=True)
    ]
