"""Command lines of transformers' example scripts, as their READMEs have them, on the matching recipes."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    PreTrainedTokenizerFast,
    T5Config,
)

from tests.launch import call, losses, only_error, start

WORDS = (
    *("the", "a", "old", "new", "red", "cat", "dog", "bird", "sat", "ran", "flew", "here", "there"),
    *("fast", "slow", "good", "bad", "fine", "poor", ".", "what", "how", "?"),
)
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def _tokenizer(folder, **special):
    vocabulary = {word: place for place, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = special.get("sep_token") or special.get("eos_token")
    first = f"{special['cls_token']} " if "cls_token" in special else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A {ends}",
        pair=f"{first}$A {ends} $B:1 {ends}:1",
        special_tokens=[(word, vocabulary[word]) for word in special.values()],
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special)
    whole.save_pretrained(folder)
    return whole


@pytest.fixture(scope="module")
def models_of(tmp_path_factory):
    """An encoder, a decoder and an encoder-decoder, tiny and untrained, each in a folder."""
    root = tmp_path_factory.mktemp("models")
    encoder = _tokenizer(
        root / "encoder",
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    AutoModelForMaskedLM.from_config(BertConfig(vocab_size=len(encoder), **SIZES)).save_pretrained(
        root / "encoder"
    )
    decoder = _tokenizer(root / "decoder", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=len(decoder), n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(root / "decoder")
    both = _tokenizer(root / "both", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    AutoModelForSeq2SeqLM.from_config(
        T5Config(
            vocab_size=len(both), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    ).save_pretrained(root / "both")  # fmt: skip
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    texts = [f"the {a} {b} {c} {d} ." for a in ("old", "new") for b in ("cat", "dog", "bird")
             for c in ("sat", "ran", "flew") for d in ("here", "there")]  # fmt: skip
    labels = [int("old" in text) for text in texts]

    def save(name, rows):
        for part, some in (("train", rows), ("dev", rows[:8])):
            (root / f"{name}_{part}.json").write_text("".join(json.dumps(row) + "\n" for row in some))

    for part, rows in (("train", texts), ("dev", texts[:8])):
        (root / f"glue_{part}.csv").write_text(
            "sentence1,sentence2,label\n"
            + "".join(f"{text},what ran ?,{labels[at]}\n" for at, text in enumerate(rows))
        )
        (root / f"text_{part}.txt").write_text("\n".join(rows) + "\n")
    save(
        "reviews",
        [{"title": "fine", "body": text, "stars": label} for text, label in zip(texts, labels, strict=True)],
    )
    save("ner", [{"tokens": t.split(), "ner_tags": ["O", "O", "B-PET", "O", "O", "O"]} for t in texts])
    save("pairs", [{"article": text, "highlights": text.split()[2]} for text in texts])
    save("translation", [{"translation": {"en": text, "ro": text}} for text in texts])
    for part, rows in (("train", texts), ("dev", texts[:8])):
        (root / f"qa_{part}.json").write_text(
            json.dumps(
                {"data": [
                    {"id": str(at), "question": "what sat ?", "context": text,
                     "answers": {"text": [text.split()[2]], "answer_start": [8]}}
                    for at, text in enumerate(rows)
                ]}
            )
        )  # fmt: skip
    return root


# Script -> recipe, its command line, and what the config must say of it.
LINES = {
    "run_glue": (
        "text_classification",
        "--model_name_or_path {models}/encoder --train_file {data}/glue_train.csv "
        "--validation_file {data}/glue_dev.csv --do_train --do_eval --max_seq_length 128 "
        "--per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 "
        "--pad_to_max_length False --evaluation_strategy epoch --warmup_ratio 0.1 --overwrite_output_dir "
        "--save_safetensors",
        {"data.max_length": 128, "batching.batching": "examples", "batching.max_tokens_per_device": 4096,
         "training_arguments.warmup_steps": 0.1, "training_arguments.eval_strategy": "epoch",
         "training_arguments.num_train_epochs": 3.0, "training.overwrite_output_dir": True},
    ),
    "run_classification": (
        "text_classification",
        "--model_name_or_path {models}/encoder --train_file {data}/reviews_train.json "
        "--validation_file {data}/reviews_dev.json --shuffle_train_dataset --metric_name accuracy "
        "--text_column_name title,body --text_column_delimiter / --label_column_name stars --do_train "
        "--do_eval --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 "
        "--num_train_epochs 1 --ignore_mismatched_sizes",
        {"task.text_columns": ["title", "body"], "task.text_delimiter": "/", "task.label_column": "stars",
         "model.new_head": True},
    ),
    "run_ner": (
        "token_classification",
        "--model_name_or_path {models}/encoder --train_file {data}/ner_train.json "
        "--validation_file {data}/ner_dev.json --text_column_name tokens --label_column_name ner_tags "
        "--task_name ner --do_train --do_eval --per_gpu_train_batch_size 8 --save_steps 750 --seed 1",
        {"task.tokens_column": "tokens", "task.tags_column": "ner_tags",
         "training_arguments.per_device_train_batch_size": 8, "training_arguments.save_strategy": "steps"},
    ),
    "run_qa": (
        "question_answering",
        "--model_name_or_path {models}/encoder --train_file {data}/qa_train.json "
        "--validation_file {data}/qa_dev.json --do_train --do_eval --per_device_train_batch_size 12 "
        "--learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128 --n_best_size 5 "
        "--max_answer_length 4",
        {"data.max_length": 384, "task.doc_stride": 128, "task.n_best": 5, "task.max_answer_tokens": 4},
    ),
    "run_summarization": (
        "summarization",
        "--model_name_or_path {models}/both --do_train --do_eval --train_file {data}/pairs_train.json "
        "--validation_file {data}/pairs_dev.json --source_prefix 'the ' --text_column article "
        "--summary_column highlights --overwrite_output_dir --per_device_train_batch_size=4 "
        "--per_device_eval_batch_size=4 --predict_with_generate --max_source_length 64 "
        "--max_target_length 16 --generation_max_length 8 --generation_num_beams 2 --sortish_sampler",
        {"data.max_length": 64, "task.val_max_target_length": 8, "task.num_beams": 2,
         "batching.max_tokens_per_device": 4 * (64 + 16)},
    ),
    "run_translation": (
        "translation",
        "--model_name_or_path {models}/both --do_train --do_eval --source_lang en --target_lang ro "
        "--source_prefix 'the ' --train_file {data}/translation_train.json "
        "--validation_file {data}/translation_dev.json --per_device_train_batch_size=4 "
        "--per_device_eval_batch_size=4 --overwrite_output_dir --predict_with_generate "
        "--max_source_length 24 --fp16_backend auto",
        {"data.max_length": 24, "task.source_lang": "en", "task.target_lang": "ro"},
    ),
    "run_clm": (
        "causal_lm",
        "--model_name_or_path {models}/decoder --train_file {data}/text_train.txt "
        "--validation_split_percentage 20 --per_device_train_batch_size 8 --per_device_eval_batch_size 8 "
        "--do_train --do_eval --block_size 32 --low_cpu_mem_usage --torch_dtype auto --keep_linebreaks",
        {"data.validation_fraction": 0.2, "task.block_size": 32, "batching.max_tokens_per_device": 256},
    ),
    "run_mlm": (
        "masked_lm",
        "--model_name_or_path {models}/encoder --train_file {data}/text_train.txt "
        "--validation_file {data}/text_dev.txt --line_by_line --pad_to_max_length --max_seq_length 64 "
        "--per_device_train_batch_size 8 --do_train --do_eval --use_fast_tokenizer --save_total_limit 1 "
        "--logging_dir {data}/logs --no_cuda",
        {"data.max_length": 64, "training_arguments.use_cpu": True},
    ),
}  # fmt: skip


def words_of(script, models, data, folder):
    recipe, line, expected = LINES[script]
    main = importlib.import_module(f"recipes.{recipe}").main
    return main, [*shlex.split(line.format(models=models, data=data)), f"--output_dir={folder}"], expected


@pytest.mark.parametrize("script", LINES)
def test_a_script_s_command_line_is_understood(script, models_of, data, tmp_path, capsys):
    main, words, expected = words_of(script, models_of, data, tmp_path / "out")
    assert call(main, *words, "--dry_run") == 0
    blocks = yaml.safe_load(capsys.readouterr().out.partition("\n\n")[0])
    for name, value in expected.items():
        block, _, key = name.partition(".")
        assert blocks[block][key] == value, name
    assert not (tmp_path / "out").exists()


def shortened(words):
    """Two steps instead of the epochs, which exclude each other."""
    at = words.index("--num_train_epochs") if "--num_train_epochs" in words else len(words)
    return [*words[:at], *words[at + 2 :], "--max_steps=2", "--logging_steps=1"]


@pytest.mark.parametrize("script", LINES)
def test_a_script_s_command_line_trains(script, models_of, data, tmp_path):
    main, words, _ = words_of(script, models_of, data, tmp_path / "out")
    assert call(main, *shortened(words)) == 0
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["eval_loss"] > 0
    assert len(losses(tmp_path / "out")) == 2


def test_each_stock_flag_is_one_line_of_the_log_and_overwriting_starts_afresh(models_of, data, tmp_path):
    out = tmp_path / "out"
    main, words, _ = words_of("run_glue", models_of, data, out)
    words = [*shortened(words), "--save_strategy=steps", "--save_steps=1", "--learning_rate=0.01"]
    done = start("text_classification", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stderr.splitlines() if " here" in line and line.startswith("--")]
    assert [line.split()[0] for line in said] == [
        "--max_seq_length", "--pad_to_max_length", "--evaluation_strategy", "--warmup_ratio",
        "--save_safetensors",
    ]  # fmt: skip
    assert "--max_seq_length 128 is --max_length 128 here" in said
    # A longer run before: its checkpoints must not be gone on from, by this run or a later one.
    (out / "checkpoint-2").rename(out / "checkpoint-9")
    (out / "checkpoint-1" / "old").touch()
    assert call(main, *words) == 0
    assert len(losses(out)) == 2
    assert sorted(one.name for one in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert not (out / "checkpoint-1" / "old").exists()


@pytest.mark.slow
def test_overwriting_by_two_processes(models_of, data, tmp_path):
    out = tmp_path / "out"
    _, words, _ = words_of("run_glue", models_of, data, out)
    for _ in range(2):
        done = start("text_classification", *shortened(words), nproc=2)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("--max_seq_length 128 is --max_length 128 here") == 1
    assert len(losses(out)) == 2


def test_a_refused_flag_is_one_line_and_nothing_is_written(models_of, data, tmp_path, capsys):
    main, words, _ = words_of("run_mlm", models_of, data, tmp_path / "out")
    assert call(main, *words, "--tpu_num_cores=8") == 2
    error = only_error(capsys.readouterr().err)
    assert error.startswith("error: --tpu_num_cores 8 can't be set: TPUs are not supported")
    assert call(main, *words, "--save_strategy=epoch", "--save_steps=5") == 2
    assert "--save_strategy epoch conflicts with --save_steps 5" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_joined_columns_are_one_text(models_of, data, tmp_path):
    """The script's own formula: the cells with the delimiter between them."""
    from recipes.text_classification import build

    recipe = build(
        model_name_or_path=str(models_of / "encoder"), train_file=f"{data}/reviews_train.json",
        validation_file=f"{data}/reviews_dev.json", text_columns=["title", "body"], text_delimiter=" . ",
        label_column="stars", max_length=32, output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    row = json.loads((data / "reviews_train.json").read_text().splitlines()[0])
    expected = recipe.tokenizer(row["title"] + " . " + row["body"])["input_ids"]
    assert list(recipe.datasets["train"][0]["input_ids"]) == expected
    recipe.lock.release()


def test_a_cache_dir_is_where_models_and_data_sets_are_taken_from(models_of, data, tmp_path):
    """Without a network: a model in the layout of the hub's cache, and a data set that is put there."""
    from recipes.text_classification import build

    cache, reviews = tmp_path / "cache", tmp_path / "reviews"
    shutil.copytree(models_of / "encoder", cache / "models--me--tiny" / "snapshots" / "abc")
    (cache / "models--me--tiny" / "refs").mkdir()
    (cache / "models--me--tiny" / "refs" / "main").write_text("abc")
    reviews.mkdir()
    for ours, split in (("train", "train"), ("dev", "validation")):
        shutil.copy(data / f"reviews_{ours}.json", reviews / f"{split}.json")
    recipe = build(
        model_name_or_path="me/tiny", dataset_name=str(reviews), cache_dir=str(cache),
        text_column_names="body",
        label_column_name="stars", max_length=32, output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    assert recipe.model.config.hidden_size == SIZES["hidden_size"]
    assert list(cache.rglob("*.arrow"))
    recipe.lock.release()
