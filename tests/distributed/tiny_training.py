"""A training script of its own: stock Trainer, a tiny BERT and random tokens, by `engines` alone.

Started by the tests under every launcher; rank 0 prints the engine that ran as one JSON line.
"""

import argparse
import dataclasses
import json
import tempfile

from hf_dist.errors import exit_on_error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="none")
    parser.add_argument("--max_steps", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--optim_from_json", action="store_true")
    options = parser.parse_args()

    from hf_dist.training.engines import lifecycle as engine
    from hf_dist.training.engines.conflicts import refuse_conflicts
    from hf_dist.training.engines.running import check_engine, read_engine

    engine.prepare_environment(options.preset)

    import torch
    import transformers
    from datasets import Dataset

    given = {
        "max_steps": options.max_steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "bf16": options.bf16,
    }
    refuse_conflicts(options.preset, given, optim_from_json=options.optim_from_json)
    overrides = engine.training_argument_overrides(
        options.preset, given, optim_from_json=options.optim_from_json
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **given,
        **overrides,
    )
    engine.start_communication(options.preset)
    model = _model(transformers, engine)

    tokens = torch.randint(5, 200, (64, 16), generator=torch.Generator().manual_seed(3))
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] % 3).tolist()})
    found = {}

    class Read(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            running = read_engine(trainer)
            check_engine(options.preset, running, training_arguments=given)
            found.update(name=running.name, **dataclasses.asdict(running))
            found["bucket_view"] = getattr(trainer.model_wrapped, "gradient_as_bucket_view", None)

    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Read()])
    engine.tune_ddp(trainer)
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        found["steps"] = trainer.state.global_step
        found["norm"] = sum(float(value.float().norm()) for value in weights.values())
        found["lr"] = arguments.learning_rate
        print(json.dumps(found), flush=True)
    engine.shutdown()


def _model(transformers, engine):
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    # Drawn whole by rank 0 (save_pretrained writes nothing on the others), loaded by all.
    import torch.distributed as dist

    folder = [tempfile.mkdtemp()]
    with engine.outside_zero_init():
        transformers.set_seed(1)
        transformers.BertForSequenceClassification(config).save_pretrained(folder[0])
    if dist.is_initialized():
        dist.broadcast_object_list(folder, src=0)
    return transformers.BertForSequenceClassification.from_pretrained(folder[0])


if __name__ == "__main__":
    exit_on_error(main)
