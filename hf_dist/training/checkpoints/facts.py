"""What must be the same for a run to go on from a checkpoint: model, tokenizer, data and plan."""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.batching.plan import Plan
from hf_dist.data.cache import key_of
from hf_dist.data.tokenizing import identity

# They say where a config came from and not what the model is.
_VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "architectures")


def run_facts(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, rows: Any, plan: Plan | None
) -> dict[str, Any]:
    """Short names of everything that a checkpoint and the run that resumes it must agree on.

    Nothing of the hardware is in them: a run may go on with another number of processes.

    Args:
        config: The model's.
        tokenizer: What made the rows.
        rows: The training rows, whose fingerprint tells their contents (a stream has none).
        plan: The steps.
    """
    fields = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    facts = {
        "model": f"{config.model_type}-{key_of(json.loads(json.dumps(fields, default=str)))}",
        "tokenizer": key_of(identity(tokenizer)),
    }
    if plan is not None:
        facts["plan"] = plan.fingerprint
        fingerprint = getattr(rows, "fingerprint", None) or getattr(rows, "_fingerprint", None)
        if fingerprint is not None:
            facts["data"] = fingerprint
    return facts
