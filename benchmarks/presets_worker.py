"""One preset's run for benchmarks/presets.py: a BERT from a config, random tokens, the stock Trainer.

Started once in each process; rank 0 writes what was measured over all ranks to --out.
"""

import argparse
import json
import resource
import time
from pathlib import Path

from hf_dist.errors import exit_on_error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", required=True)
    parser.add_argument("--initial", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    options = parser.parse_args()

    from hf_dist.training.engines import lifecycle
    from hf_dist.training.engines.running import read_engine

    lifecycle.prepare_environment(options.preset)

    import torch
    import torch.distributed as dist
    import transformers
    from datasets import Dataset

    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        report_to=[],
        disable_tqdm=True,
        save_steps=options.steps,
        **lifecycle.training_argument_overrides(options.preset),
    )
    lifecycle.start_communication(options.preset)
    imported = _peak()
    model = transformers.BertForSequenceClassification.from_pretrained(options.initial)
    parameters = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    rows = options.rows * options.steps * dist.get_world_size()
    shape = (rows, options.length)
    tokens = torch.randint(5, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(3))
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] % 2).tolist()})
    seconds: list[float] = []
    peaks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seconds.append(-time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):
            seconds[-1] += time.perf_counter()
            peaks[:] = [_peak()]  # before anything is saved

    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()])
    lifecycle.tune_ddp(trainer)
    trainer.train()
    trainer.save_model(str(options.folder / "saved"))
    found: list[dict] = [{}] * dist.get_world_size()
    measured = {"imported": imported, "train_peak": peaks[0], "peak": _peak(), "seconds": seconds}
    dist.all_gather_object(found, measured)
    if trainer.is_world_process_zero():
        running = read_engine(trainer)
        content = {"engine": running.name, "parameters": parameters, "ranks": found}
        (options.folder / "measured.json").write_text(json.dumps(content))
    lifecycle.shutdown()


def _peak() -> float:
    """The most memory that this process has had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    exit_on_error(main)
