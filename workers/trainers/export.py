"""The final Hugging Face folder: written, re-loaded, compared, then marked ``.complete``."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from activities.storage.atomic import storage_errors
from models.errors import ContractViolation
from models.evaluation import ExportReport
from workers.sources.expert_names import file_weights
from workers.sources.folders import staged
from workers.sources.tensor_file import tensor_checksums
from workers.trainers.load import load_model
from workers.trainers.logprobs import Scorer
from workers.trainers.ranks import Ranks, agreed
from workers.trainers.shards import gathered
from workers.trainers.weights import fill_model_folder, named_weights

COMPLETE = ".complete"
_FLOAT32_TOLERANCE = 1e-4  # of the largest logit: attention kernels and devices round differently
_PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ExportProbe:
    """A held-out question that the exported model answers greedily."""

    prompt_ids: tuple[int, ...]
    question: str
    max_new_tokens: int


def export_hf(
    model: Any,
    companions: Path,
    folder: Path,
    probe: ExportProbe,
    *,
    policy_version: int,
    uri: str,
    scorer: Scorer,
    ranks: Ranks,
) -> ExportReport:
    """Write ``folder`` (made exclusively) in the prepared model's own dtype and prove it loads.

    A finished export that is there already is proved again: it must hold these very weights.

    Every re-loaded parameter must equal the trainer's, cast, bit for bit; the logits on probe
    tokens are compared, the trainer's master weights against the re-loaded folder. The first rank
    does it; the others give it their parts and their share of the logits.

    Raises:
        ContractViolation: ``folder`` is something else, or what was re-loaded differs.
    """
    started = time.perf_counter()
    own = scorer.plain_logits(torch.tensor(probe.prompt_ids[:_PROBE_TOKENS]))
    described = ""
    family = model.config.model_type
    with agreed(ranks), storage_errors(uri), gathered(named_weights(model), family) as data:
        if ranks.rank == 0:
            dtype = _companion_dtype(companions)
            exact = dtype == torch.float32 and (ranks.world == 1 or scorer.dtype == torch.float32)
            with _filled(model, companions, folder, dtype, data) as (filled, checksums):
                difference, answer = _prove(filled, checksums, probe, dtype, own, exact=exact)
            described = ExportReport(
                uri=uri,
                policy_version=policy_version,
                num_bytes=sum(p.stat().st_size for p in folder.iterdir()),
                num_parameters=sum(p.numel() for p in model.parameters()),
                max_abs_logit_difference=difference,
                answer=answer,
                question=probe.question,
                seconds=time.perf_counter() - started,
            ).model_dump_json()
    return ExportReport.model_validate_json(ranks.exchange(described)[0])


@contextmanager
def _filled(
    model: Any,
    companions: Path,
    folder: Path,
    dtype: torch.dtype,
    data: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Where the export is, to be proved, and the checksums of the trainer's tensors as cast.

    A new one is renamed to ``folder`` when the block ends well.
    """
    if (folder / COMPLETE).exists():
        yield folder, tensor_checksums(data, dtype)
    elif folder.exists():
        raise ContractViolation(f"{folder} exists and is not a finished export; remove it first")
    else:
        with staged(folder) as stage:
            yield stage, fill_model_folder(model, companions, stage, dtype, data)
            (stage / COMPLETE).touch()


def _companion_dtype(companions: Path) -> torch.dtype:
    """The data type that the prepared model was published in; float32 when it does not say."""
    config = json.loads((companions / "config.json").read_text())
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _prove(
    folder: Path,
    checksums: dict[str, str],
    probe: ExportProbe,
    dtype: torch.dtype,
    own: Tensor,
    *,
    exact: bool,
) -> tuple[float, str]:
    """Re-load ``folder`` and compare; returns the largest logit gap and the greedy answer."""
    loaded = load_model(folder)
    _compare_weights(checksums, loaded, dtype, folder)
    ids = torch.tensor([list(probe.prompt_ids[:_PROBE_TOKENS])])
    with torch.no_grad():
        again: Tensor = loaded(input_ids=ids, use_cache=False).logits[0]
    difference = float((own - again).abs().max())
    limit = _FLOAT32_TOLERANCE * max(1.0, float(own.abs().max()))
    if not difference < (limit if exact else float("inf")):
        raise ContractViolation(
            f"{folder}: re-loaded logits differ by {difference:.3g}, more than {limit:.3g}"
        )
    return difference, _greedy_answer(loaded, folder, probe)


def _compare_weights(
    checksums: dict[str, str], loaded: Any, dtype: torch.dtype, folder: Path
) -> None:
    """Every re-loaded tensor equals the trainer's as cast for the file."""
    weights = file_weights(named_weights(loaded), loaded.config.model_type)
    theirs = tensor_checksums(weights.items(), dtype)
    remedy = ""
    if (folder / COMPLETE).exists():
        remedy = "; it is a finished export of other weights: remove it first"
    if checksums.keys() != theirs.keys():
        raise ContractViolation(
            f"{folder}: tensors differ: {sorted(checksums.keys() ^ theirs.keys())[:3]}{remedy}"
        )
    for name, checksum in checksums.items():
        if theirs[name] != checksum:
            raise ContractViolation(f"{folder}: {name} was re-loaded with other values{remedy}")


def _greedy_answer(loaded: Any, folder: Path, probe: ExportProbe) -> str:
    """What the exported folder's own model and tokenizer say to the probe's question."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = torch.tensor([list(probe.prompt_ids)])
    with torch.no_grad():
        output = loaded.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=probe.max_new_tokens,
        )
    answer: str = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    return answer
